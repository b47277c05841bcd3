"""The table, the picture and the data of a run."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.network.results import Row, Step
from benchmarks.pictures import COLORS, INK, drawing, label, title
from examples.common.tables import table

RESULTS, PICTURE = "results.json", "step.png"
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


def picture(steps: Sequence[Step], path: Path) -> None:
    """Measured steps as bars, compute before the exchange; predictions as marks."""
    rates = list(dict.fromkeys(x.mbit for x in steps))
    lines = 0.3 * len(steps) + 0.75 * len(rates)
    with drawing(path, 1.3 + lines, nrows=len(rates), squeeze=False) as (
        figure,
        panels,
    ):
        for panel, rate in zip(panels.flat, rates, strict=True):
            here = [x for x in steps if x.mbit == rate]
            names = [x.optimizer for x in here]
            alone = [x.alone_seconds * 1e3 for x in here]
            rest = [(x.step_seconds - x.alone_seconds) * 1e3 for x in here]
            panel.barh(names, alone, color=COLORS["Muon"], label="nothing sent")
            panel.barh(
                names, rest, left=alone, color=COLORS["exchange"], label="the exchange"
            )
            for x in here:
                longer = 1e3 * max(x.step_seconds, x.predicted_seconds or 0)
                text = f"{x.step_seconds * 1e3:.0f}"
                label(panel, text, (longer, x.optimizer), (5, 0), INK)
            if rate:
                advised = [(x.predicted_seconds or math.nan) * 1e3 for x in here]
                panel.plot(
                    advised, names, "|", color="#ff8c42", markersize=19,
                    markeredgewidth=3, label="advised",
                )  # fmt: skip
            panel.invert_yaxis()
            panel.grid(visible=False, axis="y")
            panel.margins(x=0.15)
            panel.set_title(f"{rate:g} Mbit/s" if rate else "not shaped")
        panels[-1][0].set_xlabel("ms a step")
        handles = panels[0][0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower left", ncols=3)
        title(figure, "A step on slow links, and what slamb_jax.advise says of it")


def read(out: Path) -> list[Step]:
    """The steps that ``write`` wrote there."""
    names = [field.name for field in dataclasses.fields(Step)]
    rows = json.loads((out / RESULTS).read_text())["rows"]
    return [Step(**{name: row[name] for name in names}) for row in rows]


def write(
    rows: Sequence[Row], conditions: Mapping[str, object], out: Path
) -> list[Path]:
    """``results.json`` and ``step.png``; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / RESULTS, out / PICTURE]
    data = {**conditions, "rows": [dataclasses.asdict(r) for r in rows]}
    paths[0].write_text(json.dumps(data, indent=1, default=str) + "\n")
    picture(rows, paths[1])
    return paths
