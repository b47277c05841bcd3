"""Fixtures of all tests."""

import jax
import pytest

from tests import optimizers


@pytest.fixture
def standard_promotion():
    """For tests that run Flax's or optax's own code."""
    with optimizers.standard_promotion():
        yield


@pytest.fixture
def quick_to_compile():
    """For programs that take a few steps: leaves out most of XLA's optimizations."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
