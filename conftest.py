"""Eight CPU devices, a strict jax, and compiled programs kept for later runs."""

import gc
import os
from importlib import metadata
from pathlib import Path

# Before jax is imported; processes that the tests start inherit all of it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the tests' time is spent compiling programs that run for milliseconds.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Half of that time goes into newer emitters of kernels, which 0.10 can do without, and
# 0.12 cannot; a quarter of the rest into cutting small programs for many threads. XLA
# takes the last of flags of one name.
os.environ["XLA_FLAGS"] = " ".join([
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_use_fusion_emitters=false"
    if metadata.version("jaxlib").startswith("0.10.")
    and os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    else "",
    os.environ.get("XLA_FLAGS", ""),
])  # fmt: skip
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".jax_cache")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

from collections.abc import Iterator

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
    """Lets a process compile anew where another was writing the kept program."""
    config.addinivalue_line(
        "filterwarnings", "ignore:Error (reading|writing) persistent compilation cache"
    )


def pytest_collection_finish() -> None:
    """Collects garbage less often: what was imported stays, and tracing makes much."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def _forget_programs() -> Iterator[None]:
    """Drops compiled programs after each file, so that a process stays small."""
    yield
    from tests.workers import stepper

    stepper.cache_clear()
    jax.clear_caches()
