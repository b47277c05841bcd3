"""Published methods as chains of public links: docs/guide/published_methods.md."""

from collections.abc import Callable
from typing import Any, TypeAlias

import optax

import slamb_jax
from benchmarks.rivals.parts import cosines, masked_momentum, own_adam, two_bits
from slamb_jax import Exchange, compressors, directions

Rate: TypeAlias = float | Callable[[Any], Any]  # or a schedule
Tx: TypeAlias = optax.GradientTransformation


def slamb(rate: Rate, exchange: Exchange, b3: float = 0.93) -> Tx:
    return optax.chain(
        slamb_jax.mask_momentum(
            exchange, directions.adam(1e-6, eps_before_correction=True), 0.9, 0.999
        ),
        slamb_jax.layerwise_trust_ratio(exchange, b3=b3),
        slamb_jax.elementwise_rescale(exchange, b3=b3),
        optax.scale_by_learning_rate(rate),
        slamb_jax.average_parameters_every(exchange),
    )


def one_bit_adam(rate: Rate, axis: str, warm: bool) -> Tx:
    exchange = Exchange(axis, payload=None if warm else "sign")
    adam = own_adam(frozen=not warm, eps=1e-8)
    return optax.chain(
        slamb_jax.mask_momentum(exchange, adam, b1=0.9, b2=None),
        optax.scale_by_learning_rate(rate),
    )


def one_bit_lamb(rate: Rate, axis: str, warm: bool) -> Tx:
    exchange = Exchange(axis, payload=None if warm else "sign")
    adam = own_adam(frozen=not warm, eps=1e-6)
    return optax.chain(
        slamb_jax.mask_momentum(exchange, adam, b1=0.9, b2=None),
        slamb_jax.layerwise_trust_ratio(exchange),
        optax.scale_by_learning_rate(rate),
    )


def signsgd(rate: Rate, axis: str) -> Tx:
    votes = compressors.of_exchange(Exchange(axis, payload="sign"))
    return optax.chain(
        optax.scale_by_sign(),
        slamb_jax.compress_with_error_feedback(votes, decay=0.0),
        optax.scale_by_sign(),
        optax.scale_by_learning_rate(rate),
    )


def distributed_lion(rate: Rate, axis: str, weight_decay: float = 0.0) -> Tx:
    votes = compressors.of_exchange(Exchange(axis, payload="sign"))
    return optax.chain(
        optax.scale_by_lion(0.9, 0.99),
        slamb_jax.compress_with_error_feedback(votes, decay=0.0),
        optax.scale_by_sign(),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate),
    )


def dgc(rate: Rate, axis: str, share: float = 0.001) -> Tx:
    top_k = compressors.top_k(share, axis)
    return optax.chain(
        masked_momentum(top_k, decay=0.9), optax.scale_by_learning_rate(rate)
    )


def powersgd(optimizer: Tx, axis: str, rank: int) -> Tx:
    factors = compressors.low_rank(rank, axis)
    return optax.chain(slamb_jax.compress_with_error_feedback(factors), optimizer)


def diloco(optimizer: Tx, axis: str, every: int, outer: Tx) -> Tx:
    exchange = Exchange(axis, payload=None, sync_every=every, outer=outer)
    return optax.chain(optimizer, slamb_jax.average_parameters_every(exchange))


def muloco(rate: Rate, axis: str, every: int, outer: Tx) -> Tx:
    return diloco(optax.contrib.muon(rate), axis, every, outer)


def sparseloco(optimizer: Tx, axis: str, every: int, share: float = 1 / 64) -> Tx:
    exchange = Exchange(axis, payload=None, sync_every=every, outer=optax.sgd(1.0))
    largest = compressors.from_codec(two_bits(share), axis)
    feedback = slamb_jax.compress_with_error_feedback(largest, decay=0.95)
    return optax.chain(
        optimizer, slamb_jax.average_parameters_every(exchange, compressor=feedback)
    )


def demo(rate: Rate, axis: str, chosen: int = 32) -> Tx:
    largest = compressors.from_codec(cosines(chosen), axis)
    return optax.chain(
        optax.scale_by_learning_rate(rate, flip_sign=False),
        slamb_jax.compress_with_error_feedback(largest, decay=0.999),
        optax.scale_by_sign(),
        optax.scale_by_learning_rate(rate),
    )
