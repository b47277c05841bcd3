"""Two real processes of one run: stopped, killed, resumed, equal to one process."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from examples import train as trainer
from examples.bert.main import Config
from examples.common import processes, records
from examples.common.options import parse
from tests import programs
from tests.close import assert_same_bits

LAUNCH = programs.EXAMPLES / "launch"
TWO = "bash", LAUNCH / "two_processes.sh"
TRAIN = "examples.train"
STEPS = 150
BERT = {"vocabulary": 120, "layers": 1, "width": 16, "heads": 2, "length": 16}
BERT |= {"batch-size": 2, "sync-every": 3, "payload": "null", "steps": STEPS}
BERT |= {"warmup-steps": 2, "log-every": 1, "eval-every": 1000}
needs_tools = pytest.mark.skipif(
    not (shutil.which("bash") and shutil.which("pkill")), reason="no bash or no pkill"
)


def launched(tmp_path, out, program, *words):
    return programs.start(
        *words, "--out", tmp_path / out, program=program,
        PORT=str(programs.free_port()),
        PYTHONPATH=str(programs.ROOT),
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        JAX_COMPILATION_CACHE_DIR=str(tmp_path / "compiled"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.1",
        XLA_FLAGS="--xla_backend_optimization_level=0",
    )  # fmt: skip


def wait_for_steps(process, path, steps):
    def reached():
        return path.exists() and any(r["step"] >= steps for r in records.read(path))

    assert programs.wait_until(reached, process), programs.finish(process, timeout=1)


def kill_one(process, slot):
    """Of the processes that this one started: the one whose command has these words."""
    group = str(process.pid)
    subprocess.run(["pkill", "-KILL", "-g", group, "-f", slot], check=True)


@pytest.mark.long
@needs_tools
def test_a_run_goes_on_without_its_first_process_and_takes_it_in_again(tmp_path):
    programs.text_in(tmp_path / "text")
    snapshots, out = tmp_path / "snapshots", tmp_path / "three"
    process = launched(
        tmp_path, "three", sys.executable, LAUNCH / "elastic.py", "--processes", "3",
        "--snapshots", snapshots, "--back", "1", "bert", "--snapshot-every", "1",
        "--timeout", "20", "--checkpoint-every", "1000",
        "--files", tmp_path / "text", "--cache", tmp_path / "tokens",
        *(f"--{name}={value}" for name, value in BERT.items()),
    )  # fmt: skip
    wait_for_steps(process, out / "metrics.jsonl", 12)
    kill_one(process, f"{snapshots}/0")
    code, told = programs.finish(process)
    assert code == 0, told
    assert "lost [0], [1, 2] go on" in told
    assert "[0, 1, 2] go on, all of them" in told
    found = re.findall(r"step (\d+) from snapshots, new workers: (.*)", told)
    assert [new for _, new in found] == ["none", "[0]"]
    steps = [r["step"] for r in records.read(out / "metrics.jsonl") if "loss" in r]
    at = int(found[0][0])  # perhaps the first process had not written this step
    assert at >= 11
    assert {*range(1, STEPS + 1)} - {*steps} <= {at}
    assert len(steps) == len({*steps})


def trained(folder):
    """What examples.train left there."""
    return programs.saved(folder / "checkpoints")


@pytest.mark.long
@needs_tools
def test_a_run_that_is_stopped_and_killed_ends_as_if_it_had_not_been(tmp_path):
    """Two processes stop, one goes on and stops, and two go on, of which one dies.

    A terminal sends SIGINT to the script and to both processes.
    """
    alone, out, at = (sys.executable, "-m", TRAIN), tmp_path / "parts", 0
    often = "--eval-every", "20", "--checkpoint-every", "10", "--log-every", "1"
    often += "--timeout", "6"
    for command, kill, number in (
        ((*TWO, TRAIN), os.killpg, signal.SIGINT),
        (alone, os.kill, signal.SIGTERM),
    ):
        process = launched(tmp_path, "parts", *command, *often)
        wait_for_steps(process, out / "metrics.jsonl", at + 3)
        kill(process.pid, number)
        status, told = programs.finish(process)
        assert status == 128 + number, told
        metadata, _ = trained(out)
        before, at = at, metadata["extra"]["next_index"]
        assert before < at < 300
        assert told.count(f"Stopped and saved at step {at}") == 1
    process = launched(tmp_path, "parts", *TWO, TRAIN, *often)
    wait_for_steps(process, out / "metrics.jsonl", at + 12)
    kill_one(process, "process-id 1")
    status, told = programs.finish(process)
    assert status == 0, told
    assert "both start again (time 1 of 3)" in told
    assert re.search(r"(task:|Task |\n)1( heartbeat|\n)", told), told  # who is lost
    assert len(programs.series(out, "loss")) == 300  # each step once
    programs.finish(launched(tmp_path, "whole", *alone, *often))
    (metadata, arrays), (alike, want) = map(trained, (out, tmp_path / "whole"))
    assert_same_bits(arrays, want)
    assert metadata["extra"] == alike["extra"] == {"next_index": 300, "workers": 4}


@pytest.mark.usefixtures("standard_promotion")
def test_the_root_of_the_programs_trains(tmp_path):
    def run(workers):
        config = trainer.Config(
            steps=20, eval_every=10, log_every=10, checkpoint_every=10,
            workers=workers, out=tmp_path,
        )  # fmt: skip
        trainer.run(trainer.digits(config), config, processes.mesh_of(workers))

    run(workers=2)
    for name in ("loss", "eval_loss"):
        first, last = programs.series(tmp_path, name)
        assert last < first < 2.3  # nats of a guess
    assert 0 < programs.series(tmp_path, "exchange/share_of_float32")[-1] < 0.1
    # It goes on with another number of workers.
    shutil.rmtree(tmp_path / "checkpoints" / "20")
    run(workers=4)
    metadata, _ = trained(tmp_path)
    assert metadata["extra"]["workers"] == 4


def test_recipes_name_options_that_exist():
    _, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    args = [a.replace("$(JOB_COMPLETION_INDEX)", "1") for a in container["args"]]
    config = parse(Config, "", args)
    assert (config.workers, config.process_id, config.num_processes) == (16, 1, 2)
    assert config.coordinator == "slamb-0.slamb:29400"
    for name in LAUNCH.glob("*.sh"):
        done = subprocess.run(["bash", "-n", name], check=False, timeout=30)
        assert done.returncode == 0


def tools_in(folder, **scripts):
    """A PATH on which these come first."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@needs_tools
@pytest.mark.parametrize("program", ["bert", TRAIN])
def test_slurm_gives_each_process_its_number(program, tmp_path):
    srun = 'for i in 0 1; do SLURM_PROCID=$i "$@"; done'
    tools = {"srun": srun, "scontrol": "echo node7; echo node8", "python": 'echo "$@"'}
    job = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "4100", "SLURM_JOB_NODELIST": "any"}
    path = tools_in(tmp_path, **tools)
    words = LAUNCH / "slurm.sh", program, "--out", "here"
    started = programs.start(*words, program="bash", PATH=path, **job)
    code, told = programs.finish(started)
    begin = "-m examples.bert.main" if program == "bert" else f"-m {TRAIN}"
    rest = "--workers 2 --num-processes 2 --coordinator node7:61444"
    lines = [f"{begin} --out here {rest} --process-id {i}" for i in range(2)]
    assert (code, told.splitlines()) == (0, lines)


@needs_tools
def test_a_run_starts_again_where_a_process_was_lost(tmp_path):
    path = tools_in(tmp_path, python='exit "$STATUS"')  # in place of a program
    for status, times in ((0, 0), (1, 3), (2, 0), (134, 3), (137, 3), (143, 0)):
        given = {"program": TWO[0], "PATH": path, "STATUS": str(status)}
        code, told = programs.finish(programs.start(*TWO[1:], "bert", **given))
        assert (code, told.count("both start again")) == (status, times)
