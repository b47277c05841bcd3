"""Checkpoints that cannot be written, read or resized."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import optax

import slamb_jax
from slamb_jax.checkpoint import resize
from tests.wrong_uses.common import bad, of
from tests.wrong_uses.replicas import STATE

SAVED = {"w": jnp.ones((4, 3))}


def saving(*args):
    def call(directory):
        with slamb_jax.Checkpoints(directory) as checkpoints:
            checkpoints.save(*args)

    return call


def restoring(like, change=lambda metadata: metadata, workers=None):
    def call(directory):
        saving(3, SAVED)(directory)
        metadata = directory / "3" / "about" / "metadata"
        metadata.write_text(change(metadata.read_text()))
        with slamb_jax.Checkpoints(directory) as checkpoints:
            checkpoints.restore(like, workers=workers)

    return call


def of_a_later_format(metadata):
    return metadata.replace('"format": 2', '"format": 3')


def of_adam():
    params = {f"w{i}": jnp.ones(4) for i in range(3)}
    state = optax.adam(0.1).init(params)[0]
    return {"w": SAVED["w"], "opt": state._replace(count=None)}


CHECKPOINTS = [
    (lambda directory: slamb_jax.Checkpoints(directory, keep=1), "keep .*1"),
    (saving(-1, STATE), "step .*-1"),
    (saving(1.5, STATE), "step .*1.5"),
    (saving(1, {"w": jnp.ones(())}), r"state\['w'\] .*\(\)"),
    (saving(1, {}), r"state .*leaves.*\{\}"),
    (saving(1, STATE, {"rng": object()}), "extra .*object"),
    (saving(1, STATE, {"x": np.ones(2)}), "extra .*ndarray"),
    (saving(1, STATE, [1]), r"extra .*\[1\]"),
    (lambda x: [saving(3, SAVED)(x) for _ in "12"], "step .*than the last, 3, got 3"),
    (restoring({"w": jnp.ones((2, 3))}), "is of 4 workers, expected 2: workers=2"),
    (restoring({"w": jnp.ones((2, 3))}, workers=4), "workers must be those of like"),
    (restoring({"v": jnp.ones((2, 3))}, workers=2), "does not fit"),
    (restoring({"v": jnp.ones((4, 3))}), r"\['v'\] is missing, .*\['w'\] is not expec"),
    (
        restoring({"w": jnp.ones((4, 2))}),
        r"\['w'\] is float32\[3\], expected float32\[2\]",
    ),
    (
        restoring({"w": jnp.ones((4, 3), jnp.bfloat16)}),
        r"float32\[3\], expected bfloat16",
    ),
    (
        restoring(of_adam()),
        r"\['opt'\] is missing, .*\['opt'\].mu\['w0'\] is .* 2 more",
    ),
    (restoring(SAVED, of_a_later_format), "has format 3, .* of slamb_jax reads 2"),
    (of(resize, {"u": jnp.ones(())}, 2), r"state\['u'\] .* leading axis"),
    (of(resize, STATE, 2), r"state\['t'\] .*same on all .*\[0, 1"),
    *bad(partial(resize, {"w": jnp.ones((4, 2))}), "workers", 0, 2.5),
]
