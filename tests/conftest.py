"""Fixtures of all tests."""

import pytest

from tests import optimizers


@pytest.fixture
def standard_promotion():
    """For tests that run Flax's or optax's own code."""
    with optimizers.standard_promotion():
        yield
