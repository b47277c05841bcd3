"""Fixtures of all tests."""

from collections.abc import Iterator

import pytest

from tests import optimizers


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """For tests that run Flax's or optax's own code."""
    with optimizers.standard_promotion():
        yield
