"""CLAIMS.md: it has every figure of the README, its data have every figure, and its
commands make them again."""

import functools
import importlib
import importlib.util
import json
import math
import re
import shlex
from collections import Counter
from statistics import fmean

import jax
import pytest
import tyro

pytest.importorskip("sklearn")

import slamb_jax
from benchmarks.train import __main__ as training
from benchmarks.train import tables
from benchmarks.train.grids import GRIDS
from benchmarks.train.grids.frontier import TESTED_ON
from benchmarks.train.results import Results
from benchmarks.train.tasks import parameters
from benchmarks.train.trials import Comparison
from slamb_jax import command_line
from tests.programs import ROOT

WORDS = {"half": 2, "third": 3, "tenth": 10, "eighteenth": 18, "nineteenth": 19}
TESTED = f"{TESTED_ON[0]} to {TESTED_ON[-1]}"
NOT_PROSE = re.compile(r"^```.*?^```$|`[^`\n]*`|!?\[[^\]]*\]\([^)]*\)", re.M | re.S)
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)*(?: ?%)?"
FIGURE = re.compile(rf"(?<![\w.])(?<!\w-){NUMBER}|\b(?:{'|'.join(WORDS)})\b")


def figures(text):
    """Numbers in digits, and fractions in words, without what is code or a link."""
    return [x.replace(" ", "") for x in FIGURE.findall(NOT_PROSE.sub(" ", text))]


def claims():
    """The rows: the page, then the eight columns."""
    page = None
    for line in (ROOT / "CLAIMS.md").read_text().splitlines():
        if line.startswith("## "):
            page = line.strip("# `")
        elif page and re.match(r"\| (?!claim \|)", line):
            yield page, *(cell.strip() for cell in line.strip("|").split("|"))


def setting_of(path, name):
    """The setting of that name in the grid whose results these are."""
    grid = GRIDS[path.stem]
    (setting,) = {x for x in grid.settings if str(x) == name}
    return grid, setting


@functools.cache
def cells(path, name):
    grid, setting = setting_of(path, name)
    trials = [trial for trial in grid.trials if trial.setting == setting]
    found = tables.cells(trials, Results(path))
    return setting, grid.dense, {cell.trial.method: cell for cell in found}


def of_runs(path, locator, seeds):
    """Sizes, rates, losses and shares of methods, and the first beside the others."""
    name, methods = locator.split(": ", 1)
    setting, dense, found = cells(path, name)
    chosen = [found[method] for method in methods.split(" / ")]
    yield from (setting.workers, setting.batch, setting.steps)
    yield parameters(setting.task)
    for cell in chosen:
        assert ", ".join(str(run["key"]["seed"]) for run in cell.runs) == seeds
        rates = [x.runs[0]["key"]["rate"] for x in (chosen[0], cell)]
        share = cell.bytes / found[dense].bytes
        yield from (share, 2 * share, 32 * share)  # also of bfloat16, and in bits
        yield from (cell.loss, rates[1], rates[0] / rates[1])
        yield chosen[0].bytes / cell.bytes
        yield f"{100 * abs(chosen[0].loss / cell.loss - 1)}%"


def of_pairs(path, locator):
    """Sizes, mean losses over the seeds of the tests, and their difference in %."""
    name, methods = locator.split(": ", 1)
    _, setting = setting_of(path, name)
    both, results = [(x,) for x in methods.split(" / ")], Results(path)
    what = Comparison(methods, *both, (setting,), TESTED_ON)
    means = [fmean(tables.losses_of(x, what, setting, results)) for x in both]
    yield from (setting.workers, setting.batch, setting.steps, *means)
    (test,) = tables.differences(what, results)
    yield from (len(test.pairs), methods.split("b1 ")[-1] if "b1 " in methods else 0.9)
    ends = test.mean - test.half, test.mean + test.half
    for x in (test.mean, *ends, math.log1p(tables.MARGIN)):
        yield f"{100 * abs(math.expm1(x))}%"
    yield "95%"


def of_example(path, name):
    """Rate, last loss, KiB per step and their shares of a run of the example."""
    runs = {run["name"]: run for run in json.loads(path.read_text())}
    run, first = runs[name], next(iter(runs.values()))
    share = run["sent"][-1] / first["sent"][-1]
    yield from (run["rate"], run["losses"][-1], share, 2 * share)
    yield run["sent"][-1] / run["steps"][-1] / 1024


def of_text(path, locator):
    """The numbers of the table row, or the paragraph, that has all parts of it."""
    blocks = [" ".join(x.split()) for x in re.split(r"\n\n|\n(?=\|)", path.read_text())]
    found = [x for x in blocks if all(part in x for part in locator.split(" & "))]
    assert len(found) == 1, f"{locator!r} is in {len(found)} places of {path.name}"
    return re.findall(NUMBER, found[0])


def values(source, seeds):
    """What the data say at one place of the column "data"."""
    name, locator = re.fullmatch(r"`([^`]+)` (.+)", source).groups()
    if name == "Exchange.share":  # of one large kernel
        kernel = jax.ShapeDtypeStruct((4096, 1024), "float32")
        return [slamb_jax.Exchange("data", payload=locator).share([kernel])]
    if name.endswith(".jsonl") and seeds == TESTED:
        return list(of_pairs(ROOT / name, locator))
    if name.endswith(".jsonl"):
        return list(of_runs(ROOT / name, locator, seeds))
    if name.endswith(".json"):
        return list(of_example(ROOT / name, locator))
    return of_text(ROOT / name, locator)


def has(found, figure):
    """Whether one of the values is the figure, to the decimals that it is given in."""
    texts = [re.sub("[, ]", "", str(x)) for x in found]
    if figure.endswith("%"):
        texts = [x for x in texts if x.endswith("%")]
    numbers = [float(x.rstrip("%")) for x in texts if x.count(".") < 2]
    if figure in WORDS:
        return any(x > 0 and round(1 / x) == WORDS[figure] for x in numbers)
    figure = figure.rstrip("%").replace(",", "")
    decimals = figure.partition(".")[2]
    if "." in decimals:  # a version
        return figure in texts
    off = 0.5001 * 10 ** -len(decimals) if decimals else 0
    return any(abs(x - float(figure)) <= off for x in numbers)


def test_every_figure_of_the_readme_has_a_row():
    rows = [figures(row[2]) for row in claims() if row[0] == "README.md"]
    of_rows = [figure for row in rows for figure in row]
    assert Counter(figures((ROOT / "README.md").read_text())) == Counter(of_rows)


@pytest.mark.parametrize("row", list(claims()), ids=lambda row: ": ".join(row[:2]))
def test_the_data_have_the_figures(row):
    page, _, figure, _, _, data, seeds, against, falsifies = row
    assert all((figures(figure), against, falsifies))
    assert set(figures(figure)) <= set(figures((ROOT / page).read_text())), page
    found = [value for source in data.split("; ") for value in values(source, seeds)]
    assert [x for x in figures(figure) if not has(found, x)] == []


def config_of(arguments):
    """Of ``python -m MODULE OPTIONS``, which ends here if an option is not known."""
    _, module, *options = arguments
    spec = importlib.util.find_spec(module)
    assert spec, module
    name = f"{module}.__main__" if spec.submodule_search_locations else module
    return tyro.cli(importlib.import_module(name).Config, args=options)


def is_made_again(config, data, seeds, minutes):
    """Trainings: every one of the row, elsewhere, in the minutes it says."""
    recorded = Results(training.RECORDED / f"{config.grid}.jsonl")
    assert config.out != training.RECORDED
    if about := training.minutes(config, recorded):
        assert int(minutes) == max(1, round(about))
    chosen = {f"{x.setting}: {x.method}" for x in training.trials(config)}
    for name, methods in re.findall(r"\.jsonl` (\S+): ([^;]+)", data):
        assert {f"{name}: {x.strip()}" for x in methods.split(" / ")} <= chosen
    wanted = {int(x) for x in re.findall(r"\d", seeds)}
    assert config.seeds is None or wanted <= set(range(config.seeds))


@pytest.mark.parametrize("row", list(claims()), ids=lambda row: ": ".join(row[:2]))
def test_the_command_makes_the_row_again(row, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, _, _, cell, minutes, data, seeds, _, _ = row
    found = re.findall(r"`((?:python -m|slamb-jax|\.ci/run) [^`]+)`", cell)
    assert found, cell
    for program, *arguments in map(shlex.split, found):
        if program == "slamb-jax":
            command_line.main(arguments)
        elif program == "python":
            config = config_of(arguments)
            if isinstance(config, training.Config):
                is_made_again(config, data, seeds, minutes)
        else:
            steps = re.findall(r"^(\w+)\(\) {", (ROOT / program).read_text(), re.M)
            assert set(arguments) <= set(steps)
    assert int(minutes) > 0


def test_a_figure_that_the_data_do_not_have_is_refused():
    dense = "`benchmarks/results/frontier.jsonl` byte_lm-8x8-300: AdamW, b1 0.8 / AdamW"
    found = values(dense, "0, 1, 2")
    assert all(has(found, x) for x in ("1.681", "7.8%", "300", "1"))
    assert not any(has(found, x) for x in ("1.680", "7.7%", "301", "third", "0.7.0"))
