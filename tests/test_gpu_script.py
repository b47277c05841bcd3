"""benchmarks/gpu.sh, with a python3 that writes down what it is asked for."""

import json
import os
import re
import sys

import pytest
import tyro

from benchmarks import step
from benchmarks.train import __main__ as training
from examples.common.options import check_names
from tests.programs import ROOT, ended

SCRIPT = ROOT / "benchmarks" / "gpu.sh"
CALL, STOPPING = 540, 2  # seconds of a call, and of the end of a part that is stopped
PARTS = ("start", "step", "scanned", "exchange", "laws", "frontier")
PYTHON = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["ASKED"], "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
"""


@pytest.mark.parametrize("tiny", [(), ("--tiny",)])
def test_each_part_is_a_command_that_means_something_and_all_fit_one_call(
    tiny, tmp_path
):
    python, asked, out = (tmp_path / name for name in ("python3", "asked", "out"))
    python.write_text(PYTHON)
    python.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    given = {"program": "bash", "PATH": path, "ASKED": str(asked)}
    ended(SCRIPT, *tiny, out, **given)
    calls = [json.loads(line)[1:] for line in asked.read_text().splitlines()]
    part = r"^(\w+): exit 0 after \d+ s of (\d+)$"
    found = re.findall(part, (out / "summary.txt").read_text(), re.M)
    limits = {name: int(limit) for name, limit in found}
    assert tuple(limits) == PARTS
    steps = [args for name, *args in calls if name == "benchmarks.step"]
    assert len(steps) == 3
    for args in steps:
        config = tyro.cli(step.Config, args=args)
        check_names("--only", config.only, step.optimizers(config.workers))
    (args,) = [args for name, *args in calls if name == "benchmarks.train"]
    config = tyro.cli(training.Config, args=args)
    methods = [trial.method for trial in training.trials(config)]
    assert methods == ["AdamW", "adamw, H 1"]
    # What is left is for its start, a compilation and a checkpoint.
    assert config.budget <= limits["frontier"] - 50
    if not tiny:
        assert sum(limits.values()) + STOPPING * len(limits) <= CALL
        page = (ROOT / "benchmarks" / "README.md").read_text()
        for name, limit in limits.items():
            assert f"| `{name}` | {limit} |" in page
    (args,) = [args for name, *args in calls if name == "pytest"]
    laws = [x.split("::") for x in args if x.startswith("tests/")]
    assert laws
    for path, test in laws:
        assert f"def {test}(" in (ROOT / path).read_text()
