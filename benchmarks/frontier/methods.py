"""The methods: how each is made, what it sends, and where its rates are looked for."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import optax

import slamb_jax
from benchmarks import rivals
from benchmarks.frontier.grid import Setting
from benchmarks.frontier.tasks import task
from benchmarks.rivals.exchange import elements, mean_sends
from slamb_jax import recipes
from slamb_jax._leaves import flatten_numbered
from slamb_jax._selections import elements_sent

AXIS = "data"
DENSE = "LAMB"  # the row that shares are of
PAYLOADS: dict[str, Any] = {
    "float32": None,
    "8 bit": slamb_jax.StochasticUniform(bits=8),
    "4 bit": slamb_jax.StochasticUniform(bits=4),
    "4 bit, means 8": slamb_jax.StochasticUniform(bits=4, mean_bits=8),
    "4 bit, fed back": slamb_jax.StochasticUniform(bits=4, error_feedback=True),
}
NAMES = {payload: name for name, payload in PAYLOADS.items()}


@dataclasses.dataclass(frozen=True)
class Method:
    """One row of the tables."""

    settings: dict[str, Any]  # what, beside the rate, defines it: part of a run's key
    rate: float  # the middle of the sweep
    make: Callable[
        ..., optax.GradientTransformation
    ]  # of schedule, setting, **settings
    sends: Callable[..., rivals.Sends]  # of params, setting, step, **settings
    agreed: Callable[..., bool] = lambda step, **settings: True  # all replicas alike?


def sends(method: Method, params: Any, setting: Setting, step: int) -> rivals.Sends:
    """The collectives of step t = 1, 2, ..."""
    return method.sends(params, setting, step, **method.settings)


def last_sends(
    method: Method, params: Any, setting: Setting, step: int
) -> rivals.Sends:
    """What it takes to have one copy of the parameters after step t."""
    if method.agreed(step, **method.settings):
        return []
    return mean_sends(elements(params), setting.workers)


def make_slamb(
    rate: optax.Schedule,
    setting: Setting,
    *,
    payload: str,
    average: str,
    **settings: Any,
) -> optax.GradientTransformation:
    return slamb_jax.slamb(
        rate,
        axis_name=AXIS,
        payload=PAYLOADS[payload],
        average_payload=PAYLOADS[average],
        min_size=task(setting.task).min_size,
        **settings,
    )


def slamb_sends(
    params: Any,
    setting: Setting,
    step: int,
    *,
    compress_ratio: float,
    sync_every: int,
    payload: str,
    average: str,
    **_: Any,
) -> rivals.Sends:
    """A mean of what is packed, and of the parameters at 1, H + 1, 2H + 1, ..."""
    selection = slamb_jax.Strided(compress_ratio, task(setting.task).min_size)
    leaves = flatten_numbered(params)[0]
    sent = sum(elements_sent(selection, leaf) for leaf in leaves)
    out = mean_sends(sent, setting.workers, PAYLOADS[payload])
    if slamb_agreed(step, sync_every=sync_every):
        every = elements(params)
        out = out + mean_sends(every, setting.workers, PAYLOADS[average])
    return out


def slamb_agreed(step: int, *, sync_every: int, **_: Any) -> bool:
    return step % sync_every == 1 % sync_every


def local_agreed(step: int, *, sync_every: int, **_: Any) -> bool:
    return step % sync_every == 0


def dense(optimizer: Callable[..., Any], rate: float, **settings: Any) -> Method:
    """An optax optimizer on mean gradients."""
    return Method(
        settings,
        rate,
        lambda rate, _, dtype="float32": rivals.averaged(optimizer(rate), AXIS, dtype),
        lambda params, setting, step, dtype="float32": rivals.averaged_sends(
            params, setting.workers, step, dtype
        ),
    )


def slamb(recipe: Mapping[str, Any], **changed: Any) -> Method:
    """A recipe, its payloads by name."""
    settings = {"payload": None, "average_payload": None, **recipe, **changed}
    settings["average"] = NAMES[settings.pop("average_payload")]
    settings["payload"] = NAMES[settings["payload"]]
    return Method(settings, 0.02, make_slamb, slamb_sends, slamb_agreed)


def rival(
    make: Callable[..., optax.GradientTransformation],
    sends: Callable[..., rivals.Sends],
    rate: float,
    agreed: Callable[..., bool] = Method.agreed,
    **settings: int,
) -> Method:
    """An optimizer that exchanges on its own."""
    return Method(
        settings,
        rate,
        lambda rate, _, **settings: make(rate, AXIS, **settings),
        lambda params, setting, step, **settings: sends(
            params, setting.workers, step, **settings
        ),
        agreed,
    )


DILOCO = rivals.diloco, rivals.diloco_sends, 0.004, local_agreed
SPARSELOCO = rivals.sparseloco, rivals.sparseloco_sends, 0.016, local_agreed
DEMO = rivals.demo, rivals.demo_sends, 0.004


def warmup_steps(setting: Setting, share: float) -> int:
    return round(share * setting.steps)


METHODS = {
    "LAMB": dense(optax.lamb, 0.02),
    "LAMB, bf16 gradients": dense(optax.lamb, 0.02, dtype="bfloat16"),
    "LAMB, 4 bit gradients": Method(
        {"payload": "4 bit"},
        0.02,
        lambda rate, _, payload: optax.chain(
            slamb_jax.randk_compress_with_error_feedback(
                slamb_jax.Strided(1.0), axis_name=AXIS, payload=PAYLOADS[payload]
            ),
            optax.lamb(rate),
        ),
        lambda params, setting, step, payload: mean_sends(
            elements(params), setting.workers, PAYLOADS[payload]
        ),
    ),
    "AdamW": dense(lambda rate: optax.adamw(rate, weight_decay=0.0), 0.004),
    "SGD-M": dense(lambda rate: optax.sgd(rate, momentum=0.9), 0.1),
    "SLAMB, FLOAT32": slamb(recipes.FLOAT32),
    "SLAMB, FEW_BYTES": slamb(recipes.FEW_BYTES),
    "SLAMB, NOISY": slamb(recipes.NOISY),
    "SLAMB, LARGE_BATCH": slamb(recipes.LARGE_BATCH),
    "SLAMB, k 1/6": slamb(recipes.LARGE_BATCH, compress_ratio=1 / 6, sync_every=20),
    "SLAMB, k 1/32": slamb(
        recipes.FEW_BYTES,
        compress_ratio=1 / 32,
        sync_every=100,
        average_payload=PAYLOADS["4 bit"],
    ),
    "SLAMB, k 1": slamb(recipes.FLOAT32, compress_ratio=1.0),
    "SLAMB, as published": slamb(
        recipes.FLOAT32, b3=0.99, sync_every=100, nu_of="gradient"
    ),
    "1-bit LAMB": Method(
        {"warmup": 0.2},
        0.02,
        lambda rate, setting, warmup: rivals.one_bit_lamb(
            rate, AXIS, setting.workers, warmup_steps(setting, warmup)
        ),
        lambda params, setting, step, warmup: rivals.one_bit_lamb_sends(
            params, setting.workers, step, warmup_steps(setting, warmup)
        ),
    ),
    "DiLoCo": rival(*DILOCO, sync_every=25),
    "DiLoCo, H 5": rival(*DILOCO, sync_every=5),
    "DiLoCo, H 100": rival(*DILOCO, sync_every=100),
    "SparseLoCo": rival(*SPARSELOCO, sync_every=25, chosen=64),
    "SparseLoCo, H 5": rival(*SPARSELOCO, sync_every=5, chosen=64),
    "DeMo": rival(*DEMO, chosen=32),
    "DeMo, 4 of a chunk": rival(*DEMO, chosen=4),
    "top-k, LAMB": Method(
        {"ratio": 0.01},
        0.02,
        lambda rate, _, ratio: optax.chain(
            rivals.topk_with_error_feedback(ratio, AXIS), optax.lamb(rate)
        ),
        lambda params, setting, step, ratio: rivals.topk_sends(
            params, setting.workers, step, ratio
        ),
    ),
    "PowerSGD, LAMB": Method(
        {"rank": 4},
        0.02,
        lambda rate, _, rank: optax.chain(
            rivals.powersgd(rank, AXIS), optax.lamb(rate)
        ),
        lambda params, setting, step, rank: rivals.powersgd_sends(
            params, setting.workers, step, rank
        ),
    ),
}

MAIN = (  # where not all can be run: one of each kind, at what it is known for
    *("LAMB", "AdamW", "1-bit LAMB", "DiLoCo", "SparseLoCo", "DeMo"),
    *("top-k, LAMB", "PowerSGD, LAMB", "SLAMB, as published", "SLAMB, FLOAT32"),
    *("SLAMB, FEW_BYTES", "SLAMB, LARGE_BATCH", "SLAMB, k 1/32"),
)
