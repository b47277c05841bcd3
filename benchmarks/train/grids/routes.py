"""Methods whose workers send their codes to all others, in no grid.

That is one message in place of two, of n / 2 times the bytes, and the mean is not
rounded again. ``benchmarks.network.time_to_loss`` trains with them.
"""

import dataclasses

from benchmarks.train import methods
from benchmarks.train.methods import Method


def to_all(name: str) -> Method:
    """The method of that name, by way of all."""
    method = methods.METHODS[name]
    exchange = dataclasses.replace(method.exchange, route="all")
    return dataclasses.replace(method, exchange=exchange)


METHODS = {
    "adamw, to all": to_all("adamw, H 1"),
    "adamw, largest of 7, to all": to_all("adamw, largest of 7"),
}
