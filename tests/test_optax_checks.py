"""optax's own checks of its optimizers, run on ours of the same names."""

import functools
import unittest

import pytest

import slamb_jax

checks = pytest.importorskip("optax._src.alias_test")
if not hasattr(checks, "_get_opt"):
    pytest.skip("this optax makes its optimizers otherwise", allow_module_level=True)

OURS = {name: getattr(slamb_jax, name) for name in ("adamw", "lamb", "lion", "sgd")}
OTHERWISE = (
    "complex",
    # Moments of 16-bit parameters are float32 unless told.
    "params_dtype='bfloat16', state_dtype=None",
    # A rate that is injected is a schedule to ours, which has a link for it.
    "inject_hyperparams13",
    # With v of the momentum, a rate that stays leaps away from the minimum at times.
    "opt_name='adamw', opt_kwargs={'learning_rate': 0.1}, target=<function _setup_ros",
)
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("standard_promotion"),
              pytest.mark.filterwarnings("default")]  # fmt: skip
SUITE = unittest.TestLoader().loadTestsFromTestCase(checks.AliasTest)
CHECKS = {  # those of our names, with real parameters, by what they say of themselves
    str(test): test
    for test in SUITE
    if any(f"opt_name='{name}'" in str(test) for name in OURS)
    and not any(other in str(test) for other in OTHERWISE)
}
assert CHECKS, "optax names its checks otherwise: none would run"


@pytest.mark.parametrize("check", CHECKS)
def test_optax_finds_nothing(check, monkeypatch):
    def ours(_, name):
        return functools.partial(OURS[name], exchange=slamb_jax.Exchange())

    monkeypatch.setattr(checks, "_get_opt", ours)
    result = unittest.TestResult()
    CHECKS[check].run(result)
    assert result.testsRun == 1
    for test, report in [*result.errors, *result.failures]:
        # With a decay rate that is injected, and so may change, the state has m itself.
        if not ("inject" in check and "Equality of new optimizer states" in str(test)):
            pytest.fail(report)
