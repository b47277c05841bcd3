"""The table, the picture and the data of a run."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from rich.table import Table

from benchmarks.network.results import Row
from examples.common.tables import table

CAPTION = (
    "alone: the same step with nothing sent, on all hosts at once; advised: "
    "slamb_jax.advise, and by how much it is off; link: the wire report's bytes over "
    "the link; kB sent: by each worker per step, by the interface counters without "
    "headers; counters /, advised /: over the wire report; headers: and "
    "acknowledgements, of all bytes sent"
)


def cells(r: Row) -> dict[str, str]:
    predicted = r.predicted_seconds
    serial = r.alone_seconds + r.link_seconds
    return {
        "Mbit/s": f"{r.mbit:g}" if r.mbit else "-",
        "optimizer": r.optimizer,
        "ms a step": f"{r.step_seconds * 1e3:.0f}",
        "alone": f"{r.alone_seconds * 1e3:.0f}",
        "advised": f"{predicted * 1e3:.0f}" if predicted else "-",
        "off": f"{predicted / r.step_seconds - 1:+.1%}" if predicted else "-",
        "/ (alone + link)": f"{r.step_seconds / serial:.2f}",
        "kB sent": f"{r.data_bytes / 1e3:.0f}",
        "wire report": f"{r.wire_bytes / 1e3:.0f}",
        "counters /": f"{r.data_bytes / r.wire_bytes:.3f}",
        "advised /": f"{r.advised_bytes / r.wire_bytes:.3f}",
        "headers": f"{r.header_share:.1%}",
    }


def measured_table(rows: Sequence[Row], title: str, machine: str) -> Table:
    return table(title, [cells(r) for r in rows], f"{CAPTION}. {machine}")


def picture(rows: Sequence[Row], path: Path) -> None:
    """Measured steps as bars, compute below the exchange; predictions as marks."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rates = list(dict.fromkeys(r.mbit for r in rows))
    size = 2.6 * len(rates) + 1, 3.6
    figure, axes = plt.subplots(
        1, len(rates), figsize=size, squeeze=False, layout="constrained"
    )
    for ax, rate in zip(axes[0], rates, strict=True):
        here = [r for r in rows if r.mbit == rate]
        names = [r.optimizer.replace(", ", "\n") for r in here]
        alone = [r.alone_seconds * 1e3 for r in here]
        rest = [(r.step_seconds - r.alone_seconds) * 1e3 for r in here]
        ax.bar(names, alone, color="tab:gray", label="the step with nothing sent")
        ax.bar(names, rest, bottom=alone, color="tab:blue", label="the exchange")
        predicted = [(r.predicted_seconds or float("nan")) * 1e3 for r in here]
        if rate:
            ax.plot(names, predicted, "k_", markersize=26, label="advised")
        ax.set(title=f"{rate:g} Mbit/s" if rate else "not shaped")
        ax.tick_params(axis="x", labelsize=8)
        ax.grid(alpha=0.3, axis="y")
    axes[0][0].set(ylabel="ms a step")
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write(
    rows: Sequence[Row], conditions: Mapping[str, object], out: Path
) -> list[Path]:
    """``results.json`` and ``step.png``; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "results.json", out / "step.png"]
    data = {**conditions, "rows": [dataclasses.asdict(r) for r in rows]}
    paths[0].write_text(json.dumps(data, indent=1, default=str) + "\n")
    picture(rows, paths[1])
    return paths
