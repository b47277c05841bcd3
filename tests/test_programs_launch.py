"""Two real processes of one run: stopped by SIGTERM, resumed, equal to one process."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import yaml

from examples.bert.main import Config
from examples.common import records
from examples.common.options import parse
from tests import programs
from tests.close import assert_same_bits

LAUNCH = programs.EXAMPLES / "launch"
TWO = "bash", LAUNCH / "two_processes.sh"
SCRIPT = *TWO, "bert"
TRAIN = "examples.train"
STEPS = 150
TINY = {"vocabulary": 120, "layers": 1, "width": 16, "heads": 2, "length": 16}
TINY |= {"batch-size": 2, "sync-every": 3, "payload": "null", "steps": STEPS}
TINY |= {"warmup-steps": 2, "log-every": 1, "eval-every": 1000}
needs_tools = pytest.mark.skipif(
    not (shutil.which("bash") and shutil.which("pkill")), reason="no bash or no pkill"
)


def started(tmp_path, out, *command):
    words = [f"--{name}={value}" for name, value in TINY.items()]
    words += ["--files", tmp_path / "text", "--cache", tmp_path / "tokens"]
    return launched(tmp_path, out, *command, *words)


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


def steps_of(metrics):
    return [r["step"] for r in records.read(metrics) if "loss" in r]


@pytest.mark.long
@needs_tools
def test_two_processes_stop_and_lose_one_and_are_like_one(tmp_path):
    """A terminal sends SIGINT to the script and to both processes."""
    programs.text_in(tmp_path / "text")
    out, at = tmp_path / "two", 0
    metrics = out / "metrics.jsonl"
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = started(tmp_path, "two", *SCRIPT)
        wait_for_steps(process, metrics, at + 3)
        kill = os.killpg if number == signal.SIGINT else os.kill
        kill(process.pid, number)
        status, told = programs.finish(process)
        assert status == code, told
        at = records.read(metrics)[-1]["step"]
        assert at < STEPS
        assert told.count(f"Stopped and saved at step {at}") == 1
        assert (out / "checkpoints" / str(at)).is_dir()
    often = "--timeout", "6", "--checkpoint-every", "5"
    process = started(tmp_path, "two", *SCRIPT, *often)
    wait_for_steps(process, metrics, at + 12)
    kill_one(process, "process-id 1")
    code, told = programs.finish(process)
    assert code == 0, told
    assert "both start again (time 1 of 3)" in told
    assert re.search(r"(task:|Task |\n)1( heartbeat|\n)", told), told
    assert steps_of(metrics) == list(range(1, STEPS + 1))

    alone = sys.executable, "-m", "examples.bert.main", "--workers", "4"
    code, told = programs.finish(started(tmp_path, "one", *alone))
    assert code == 0, told
    one, two = (programs.series(tmp_path / x, "loss") for x in ("one", "two"))
    np.testing.assert_allclose(one[: at + 5], two[: at + 5], rtol=1e-3)


@pytest.mark.long
@needs_tools
@pytest.mark.parametrize("victim", [0, 2])
def test_a_run_goes_on_without_a_process_and_takes_it_in_again(victim, tmp_path):
    programs.text_in(tmp_path / "text")
    program = "bert" if victim else "examples.bert.main"  # a name, or any module
    snapshots, out = tmp_path / "snapshots", tmp_path / "three"
    process = started(
        tmp_path, "three", sys.executable, LAUNCH / "elastic.py", "--processes", "3",
        "--snapshots", snapshots, "--back", "1", program, "--snapshot-every", "1",
        "--timeout", "20", "--checkpoint-every", "1000",
    )  # fmt: skip
    wait_for_steps(process, out / "metrics.jsonl", 12)
    kill_one(process, f"{snapshots}/{victim}")
    code, told = programs.finish(process)
    assert code == 0, told
    others = [slot for slot in range(3) if slot != victim]
    assert f"lost [{victim}], {others} go on" in told
    assert "[0, 1, 2] go on, all of them" in told
    found = re.findall(r"step (\d+) from snapshots, new workers: (.*)", told)
    assert [new for _, new in found] == ["none", f"[{victim}]"]
    steps = steps_of(out / "metrics.jsonl")
    at = int(found[0][0])  # if process 0 was killed, perhaps before it wrote this step
    assert at >= 11
    assert {*range(1, STEPS + 1)} - {*steps} <= {at}
    assert len(steps) == len({*steps})


def trained(folder):
    """What examples.train left there."""
    return programs.saved(folder / "checkpoints")


@pytest.mark.long
@needs_tools
def test_the_root_of_the_programs_stops_resumes_and_ends_as_if_it_had_not(tmp_path):
    """In two processes, then in one, then in two; and in one without a stop."""
    alone, out, at = (sys.executable, "-m", TRAIN), tmp_path / "parts", 0
    often = "--eval-every", "20", "--checkpoint-every", "20"
    for command in ((*TWO, TRAIN), alone):
        process = launched(tmp_path, "parts", *command, *often)
        first = out / "checkpoints" / str(20 * (at // 20 + 1))
        assert programs.wait_until(first.is_dir, process), programs.finish(process)
        os.kill(process.pid, signal.SIGTERM)
        status, told = programs.finish(process)
        assert status == 143, told
        metadata, _ = trained(out)
        before, at = at, metadata["extra"]["next_index"]
        assert before < at < 300
        assert told.count(f"Stopped and saved at step {at}") == 1
    for folder, command in (("parts", (*TWO, TRAIN)), ("whole", alone)):
        status, told = programs.finish(launched(tmp_path, folder, *command, *often))
        assert status == 0, told
    (metadata, arrays), (alike, want) = map(trained, (out, tmp_path / "whole"))
    assert_same_bits(arrays, want)
    assert metadata["extra"] == alike["extra"] == {"next_index": 300, "workers": 4}


def test_the_root_of_the_programs_trains(tmp_path):
    words = "--steps", "20", "--eval-every", "10", "--log-every", "10"
    words += "--checkpoint-every", "10"
    programs.ended("-m", TRAIN, *words, "--workers", "2", "--out", tmp_path)
    for name in ("loss", "eval_loss"):
        first, last = programs.series(tmp_path, name)
        assert last < first < 2.3  # nats of a guess
    assert 0 < programs.series(tmp_path, "exchange/share_of_float32")[-1] < 0.1
    # It goes on with another number of workers.
    shutil.rmtree(tmp_path / "checkpoints" / "20")
    programs.ended("-m", TRAIN, *words, "--workers", "4", "--out", tmp_path)
    metadata, _ = trained(tmp_path)
    assert metadata["extra"]["workers"] == 4


def test_a_program_that_ignores_sigterm_is_told_of(tmp_path, monkeypatch, capfd):
    spec = importlib.util.spec_from_file_location("elastic", LAUNCH / "elastic.py")
    elastic = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(elastic)
    monkeypatch.setattr(elastic, "HANGS", 0.2)
    until = tmp_path / "0" / "end"
    line = 'trap "" TERM; until [ -e "$2" ]; do touch "$1"; sleep 0.05; done'
    until.parent.mkdir()
    words = ["sh", "-c", line, "sh", until.with_name("1.snapshot"), until]
    running = {0: subprocess.Popen(words)}
    threading.Timer(3.0, until.touch).start()
    elastic.watch(running, tmp_path, 0.1)
    assert running[0].wait(60) == 0
    assert "SIGTERM was sent 0.2 s ago, and no process has" in capfd.readouterr().err


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
        given = {"program": SCRIPT[0], "PATH": path, "STATUS": str(status)}
        code, told = programs.finish(programs.start(*SCRIPT[1:], **given))
        assert (code, told.count("both start again")) == (status, times)
