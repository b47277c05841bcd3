"""Who is ahead at whose bytes: each rival beside SLAMB at no more, or its fewest."""

from rich.table import Table

from benchmarks.frontier.grid import Setting
from benchmarks.frontier.methods import DENSE, METHODS
from benchmarks.frontier.report import losses, mean_loss, spread, total_bytes
from benchmarks.frontier.results import Results
from benchmarks.frontier.sweep import finished

SHARES = 1 / 1000, 1 / 4  # of dense LAMB's bytes: where to compare


def versus(setting: Setting, results: Results) -> Table | None:
    """A row for each rival within the range; None if there is nothing to compare."""
    found = {name: finished(setting, name, results) for name in METHODS}
    sent = {name: total_bytes(runs) for name, runs in found.items() if runs}
    ours = [name for name in sent if name.startswith("SLAMB")]
    if DENSE not in sent or not ours:
        return None
    shares = {name: value / sent[DENSE] for name, value in sent.items()}
    out = Table(
        title=f"{setting}: each rival, and SLAMB at no more bytes or else its fewest"
    )
    for head in ("rival", "share", "loss", "SLAMB", "share", "loss", "behind by, %"):
        left = head in ("rival", "SLAMB")
        out.add_column(head, justify="left" if left else "right")
    for name in sorted(shares, key=shares.__getitem__, reverse=True):
        if name in ours or not SHARES[0] <= shares[name] <= SHARES[1]:
            continue
        row = [name, f"{shares[name]:.4f}", spread(losses(found[name]))]
        fewest = max(shares[name], min(shares[other] for other in ours))
        able = [other for other in ours if shares[other] <= fewest]
        best = min(able, key=lambda other: mean_loss(found[other]))
        behind = 100 * (mean_loss(found[best]) / mean_loss(found[name]) - 1)
        row += [best, f"{shares[best]:.4f}", spread(losses(found[best]))]
        row += [f"{behind:+.1f}"]
        out.add_row(*row)
    return out if out.row_count else None
