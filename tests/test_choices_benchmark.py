"""The choices of ``python -m benchmarks.choices``: each can be made, run and stored."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks.choices import CHOICES, DENSE, Config, method_of


@pytest.mark.parametrize("name", [DENSE, *CHOICES])
def test_every_choice_is_an_optimizer_and_a_file_name(name: str) -> None:
    assert Path(Config().out, name).parent == Config().out
    method = method_of(name, seed=0)
    params = {"w": jnp.ones((4, 4), jnp.bfloat16), "b": jnp.zeros(4, jnp.bfloat16)}
    assert method.make(0.1, method.exchange).init(params) is not None
