"""Tables with spreads, from the results as far as there are any."""

import dataclasses
import math
import statistics

from rich.table import Table
from scipy import stats

from benchmarks.frontier.fineweb import MARGIN, TARGET
from benchmarks.frontier.grid import Setting
from benchmarks.frontier.methods import DENSE, METHODS, OURS
from benchmarks.frontier.results import Result, Results, last_loss
from benchmarks.frontier.sweep import finished, swept
from benchmarks.frontier.tasks import task
from examples.common.tables import spread, table

COMPARED = 1 / 1000, 1 / 4  # of dense bytes: where rivals are compared
RING_SHARES = {  # of its payload, what each of n workers sends around a ring
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A method in a setting: its runs, one for each seed."""

    runs: list[Result]
    workers: int
    tuned: int  # runs of the sweeps that its settings come from

    @property
    def losses(self) -> list[float]:
        return [last_loss(run) for run in self.runs]

    @property
    def loss(self) -> float:
        """The last evaluation loss, over seeds."""
        return statistics.fmean(self.losses)

    @property
    def half_interval(self) -> float:
        """Half the interval of 95 % of the mean, by Student's t; 0 for one run."""
        if len(self.losses) == 1 or self.loss == float("inf"):
            return 0.0
        return half_interval(self.losses)

    @property
    def bytes(self) -> float:
        """Bytes that each worker sends in a run; as many with every seed."""
        return sum(
            often * RING_SHARES[kind](self.workers) * payload
            for kind, payload, often in self.runs[0]["points"][-1]["exchanges"]
        )


Cells = dict[str, Cell]
OUR_GROUPS = {name.rstrip(",") for name in OURS}


def half_interval(values: list[float]) -> float:
    """Half the interval of 95 % of the mean of two or more, by Student's t."""
    n = len(values)
    t = float(stats.t.ppf(0.975, n - 1))
    return t * statistics.stdev(values) / math.sqrt(n)


def group(method: str) -> str:
    """The optimizer, or the algorithm, that a method is a setting of."""
    return method.split(",")[0]


def variant_of(method: str) -> str:
    """The method without the settings of its outer step, the best of which counts."""
    return method.split(", outer ")[0]


def cells(setting: Setting, results: Results) -> Cells:
    """Of the methods that have finished runs in this setting, of variants the best."""
    best: dict[str, tuple[str, Cell]] = {}
    for name in METHODS:
        if runs := finished(setting, name, results):
            tuned = sum(1 for _ in swept(setting, name, results))
            cell = Cell(runs, setting.workers, tuned)
            kind = variant_of(name)
            if kind in best:
                other = best[kind][1]
                both = cell.tuned + other.tuned
                if other.loss <= cell.loss:
                    name, cell = best[kind][0], other
                cell = dataclasses.replace(cell, tuned=both)
            best[kind] = name, cell
    return dict(best.values())


def above_dense(found: Cells) -> dict[str, list[tuple[float, float, float]]]:
    """Of each group the share of dense bytes, and the loss above the best in % and ±.

    Settings that are no better than others of their group at fewer bytes are left out.
    """
    if DENSE not in found:
        return {}
    shares = {name: cell.bytes / found[DENSE].bytes for name, cell in found.items()}
    best = min(cell.loss for name, cell in found.items() if shares[name] > 0.9)
    out: dict[str, list[tuple[float, float, float]]] = {}
    for name in sorted(shares, key=shares.__getitem__):
        above = 100 * (found[name].loss / best - 1)
        points = out.setdefault(group(name), [])
        if points and above < points[-1][1] and shares[name] <= 1.001 * points[-1][0]:
            points.pop()
        if not points or above < points[-1][1]:
            points.append((shares[name], above, 100 * found[name].half_interval / best))
    return out


def above(cell: Cell, dense: Cell) -> str:
    """By how many per cent a loss ends above another's."""
    if cell.loss == float("inf"):
        return "diverged"
    return f"{100 * (cell.loss / dense.loss - 1):+.1f}"


def setting_table(setting: Setting, found: Cells) -> Table:
    """Losses and bytes of every method."""
    machines = sorted({run["hardware"] for cell in found.values() for run in cell.runs})
    rows, dense = [], found.get(DENSE)
    for name, cell in found.items():
        row = {
            "method": name,
            "rate": f"{cell.runs[0]['key']['rate']:g}",
            "tuned in": f"{cell.tuned} runs",
            "seeds": str(len(cell.runs)),
            "loss": spread(cell.losses),
            f"above {DENSE}, %": above(cell, dense) if dense else "",
            "MiB sent": f"{cell.bytes / 2**20:.2f}",
            "share": f"{cell.bytes / dense.bytes:.4f}" if dense else "",
            "of bfloat16": f"{2 * cell.bytes / dense.bytes:.4f}" if dense else "",
        }
        rows.append(row)
    title = (
        f"{setting.task}, {setting.workers} workers x {setting.batch}, "
        f"{setting.steps} steps; loss in {task(setting.task).unit}"
    )
    caption = (
        f"{'; '.join(machines)}; ± is the deviation over seeds; of all outer steps the "
        "best is shown; share: of the bytes of dense float32"
    )
    return table(title, rows, caption)


def track_table(setting: Setting, found: Cells) -> Table | None:
    """Which methods reach the target of the track, by its own rule."""
    if setting.task != "fineweb":
        return None
    rows = []
    for name, cell in found.items():
        score = (TARGET - cell.loss) * math.sqrt(len(cell.losses))
        row = {
            "method": name,
            "seeds": str(len(cell.losses)),
            f"({TARGET} - mean) sqrt(n)": f"{score:.4f}",
            "reached": "yes" if score >= MARGIN else "no",
            "GB sent by a worker": f"{cell.bytes / 1e9:.1f}",
        }
        rows.append(row)
    caption = f"Reached: {MARGIN} or more, as modded-nanogpt's optimization track asks"
    return table(f"{setting}: to a validation loss of {TARGET}", rows, caption)


def rivals_table(setting: Setting, found: Cells) -> Table | None:
    """Each rival beside our best that sends no more, or else sends the fewest."""
    ours = [name for name in found if name.startswith(OURS)]
    if DENSE not in found or not ours:
        return None
    shares = {name: cell.bytes / found[DENSE].bytes for name, cell in found.items()}
    out = Table(
        title=f"{setting}: each rival, and our best at no more bytes or else our "
        "fewest (shares of dense float32, half of those of bfloat16)"
    )
    for words, *numbers in (
        ("rival", "share", "loss"),
        ("ours", "share", "loss", "behind by, %"),
    ):
        out.add_column(words)
        for head in numbers:
            out.add_column(head, justify="right")
    for name in sorted(shares, key=shares.__getitem__, reverse=True):
        if name in ours or not COMPARED[0] <= shares[name] <= COMPARED[1]:
            continue
        most = max(shares[name], min(shares[other] for other in ours))
        able = [other for other in ours if shares[other] <= most]
        best = min(able, key=lambda other: found[other].loss)
        cells = [
            cell
            for x in (name, best)
            for cell in (x, f"{shares[x]:.4f}", spread(found[x].losses))
        ]
        out.add_row(*cells, above(found[best], found[name]))
    return out if out.row_count else None


def overview(every: dict[Setting, Cells]) -> Table | None:
    """Each method in each setting; None unless two settings have AdamW and another."""
    shown = {
        s: found for s, found in every.items() if DENSE in found and len(found) > 1
    }
    if len(shown) < 2:
        return None
    rows = []
    for name in METHODS:
        here = [found for found in shown.values() if name in found]
        shares = [  # a run that diverged stopped early
            found[name].bytes / found[DENSE].bytes
            for found in here
            if found[name].loss < float("inf")
        ]
        ends = (min(shares), max(shares)) if shares else ()
        share, of_bfloat16 = (
            " to ".join(dict.fromkeys(f"{times * x:.3f}" for x in ends))
            for times in (1, 2)
        )
        losses = {
            str(setting): above(found[name], found[DENSE]) if name in found else ""
            for setting, found in shown.items()
        }
        if here:
            of = {"share": share, "of bfloat16": of_bfloat16}
            rows.append({"method": name, **of, **losses})
    return table(
        f"Loss above dense {DENSE}'s, %, and the range of the shares of its bytes",
        rows,
        "A setting is task-workers x batch-steps; means over seeds; share: of float32",
    )
