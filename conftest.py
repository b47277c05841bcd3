"""Eight CPU devices, a strict jax, and compiled programs that later runs reuse."""

import os
from pathlib import Path

_DEVICES = "--xla_force_host_platform_device_count=8"
_FLAGS = os.environ.get("XLA_FLAGS", "")
# Before jax is imported; processes that the tests start inherit all of it.
if "xla_force_host_platform_device_count" not in _FLAGS:
    os.environ["XLA_FLAGS"] = f"{_FLAGS} {_DEVICES}".strip()
for name, value in {
    "JAX_PLATFORMS": "cpu",
    # Most of the tests' time is spent compiling programs that run for milliseconds.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parent / ".jax_cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
}.items():
    os.environ.setdefault(name, value)

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

for profile, examples in {"default": 5, "ci": 60}.items():
    hypothesis.settings.register_profile(
        profile,
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    # Two processes may write one entry at once; who reads half of it compiles anew.
    config.addinivalue_line(
        "filterwarnings", "ignore:Error (reading|writing) persistent compilation cache"
    )


@pytest.fixture(autouse=True, scope="module")
def _forget_programs() -> object:
    """Drops compiled programs after each file; a process stays under 2 GB."""
    yield
    from tests.workers import stepper

    stepper.cache_clear()
    jax.clear_caches()
