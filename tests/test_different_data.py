"""The benchmark whose workers see different data, and what it says of the default."""

import numpy as np
import pytest

from benchmarks.different_data import BATCH, METHODS, WORKERS, batches, train
from tests.optimizers import standard_promotion


@pytest.mark.parametrize("apart", [False, True])
def test_a_worker_has_two_classes_where_data_differ(apart: bool) -> None:
    _, y = next(batches(apart, 0))
    for i in range(WORKERS):
        classes = set(y[i * BATCH : (i + 1) * BATCH] // 2)
        assert (classes == {i}) is apart


@pytest.mark.long
def test_the_default_is_dense_where_data_differ_and_local_steps_are_not() -> None:
    with standard_promotion():
        found = {
            name: train(METHODS[name][0], 3e-3, True, 0)
            for name in ("optax.adamw", "adamw", "adamw, H 4")
        }
        alike = train(METHODS["adamw"][0], 3e-3, False, 0)
    loss, accuracy, _ = found["optax.adamw"]
    assert found["adamw"][0] < 3 * loss
    assert found["adamw"][1] > accuracy - 0.01
    assert found["adamw, H 4"][0] > 10 * loss  # one that would notice
    assert found["adamw"][2] < 0.7
    assert np.isfinite(alike[0])
    assert alike[2] > 0.7
