"""What a program would hold and send at full size, from shapes alone.

Run from the root of the repository, for instance
``python -m examples.shapes cifar10 --config examples/cifar10/configs/slamb.yaml``. It
compiles the optimizer, and the whole step with ``--compile``, on CPU devices, but never
has the arrays.
"""

import importlib
import math
import sys
from typing import Any

import jax
from rich.console import Console

import slamb_jax
from examples.common import loop, options, processes
from examples.common.optimizers import optimizer, traffic
from examples.sweep import PROGRAMS

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options of XLA's on CPU for a program that is not going to run."""


def describe(program: str, args: list[str], whole: bool) -> dict[str, Any]:
    """Parameters, bytes sent per step and share of dense; memory if compiled."""
    train = importlib.import_module(f"examples.{program}.train")
    config = options.parse(train.Config, __doc__ or "", args)
    mesh = processes.start(config)
    task = train.task(config, train.blank(config))
    state, batch, key = loop.shapes(task, config, mesh)
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.params
    )
    sent = traffic(config, params, mesh)
    found = {
        "parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(params)),
        "leaves": len(jax.tree.leaves(params)),
        "steps": task.steps,
        "MiB sent per step": sent.until(task.steps) / task.steps / 2**20,
        "share of dense": sent.until(task.steps) / task.steps / sent.dense,
    }
    if whole:
        tx = optimizer(config, task.schedule, task.decay_mask)
        step = slamb_jax.per_worker_step(loop.make_step(task, tx), mesh, processes.AXIS)
        lowered = step.lower(state, batch, key)
        memory = lowered.compile(compiler_options=QUICK).memory_analysis()
        found["GiB of state and batch"] = memory.argument_size_in_bytes / 2**30
        found["GiB of temporaries"] = memory.temp_size_in_bytes / 2**30
    return found


def main() -> None:
    args = sys.argv[1:]
    whole = "--compile" in args
    if not args or args[0] not in PROGRAMS:
        raise SystemExit(f"{__doc__}\nThe first argument is one of {PROGRAMS}")
    rest = [word for word in args[1:] if word != "--compile"]
    for name, value in describe(args[0], rest, whole).items():
        Console().print(f"{name}: {value:,.3f}".replace(".000", ""))


if __name__ == "__main__":
    main()
