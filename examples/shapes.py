"""Memory and traffic of a program at full size, from shapes alone.

Run from the root of the repository, for instance
``python -m examples.shapes cifar10 --config examples/cifar10/configs/slamb.yaml``. It
compiles the optimizer, and the step itself with ``--compile``, on CPU devices; the
arrays are never allocated.
"""

import importlib
import math
import sys

import jax
from rich.console import Console

from examples.common import loop, options, processes
from examples.common.optimizers import traffic
from examples.sweep import PROGRAMS

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""XLA's options on CPU for a program that will not run."""


def describe(program: str, args: list[str], compiled: bool) -> dict[str, float]:
    """Parameters, bytes sent per step and share of dense; memory if compiled."""
    train = importlib.import_module(f"examples.{program}.train")
    config = options.parse(train.Config, __doc__ or "", args)
    mesh = processes.start(config)
    task = train.task(config, train.blank(config))
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    sent, dense = (x.until(task.steps) for x in traffic(config, params, mesh))
    found = {
        "parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(params)),
        "leaves": len(jax.tree.leaves(params)),
        "steps": task.steps,
        "MiB sent per step": sent / task.steps / 2**20,
        "share of dense": sent / dense,
    }
    if compiled:
        step = loop.compiled_step(task, config, mesh)
        lowered = step.lower(*loop.shapes(task, config))
        memory = lowered.compile(compiler_options=QUICK).memory_analysis()
        found["GiB of state and batch"] = memory.argument_size_in_bytes / 2**30
        found["GiB of temporaries"] = memory.temp_size_in_bytes / 2**30
    return found


def main() -> None:
    args = sys.argv[1:]
    if not args or args[0] not in PROGRAMS:
        raise SystemExit(f"{__doc__}\nThe first argument is one of {PROGRAMS}")
    rest = [word for word in args[1:] if word != "--compile"]
    for name, value in describe(args[0], rest, "--compile" in args).items():
        Console().print(f"{name}: {value:,.3f}".replace(".000", ""))


if __name__ == "__main__":
    main()
