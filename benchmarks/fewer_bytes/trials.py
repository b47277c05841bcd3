"""The ways to send that are tried: what is sent of the momentum, and what waits."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Trial:
    """A way to send; see ``mask_momentum`` for what waits."""

    up: str | None
    """the wire format of a worker's momentum; None: float32"""
    down: str | None = ""
    """that of the mean; as the worker's, if not said"""
    turns: int = 1
    """each coordinate is sent at every so manieth step"""
    rank: int = 0
    """of matrices a product of this rank, in float32; ``up`` is for the rest"""
    b1: float = 0.8
    after: float = 0.0
    """decay rate of a momentum after the exchange"""
    b2: float = 0.95
    forgotten: float = 0.5
    mean_waits: float = 0.0
    """the share of what rounding takes of the mean that waits, with one worker"""
    predicted: float = 0.0
    """so much of what was received last is expected; only the difference is sent"""


SEVEN, THIRTY_ONE = "largest_of_7", "largest_of_31"
TRIALS = {
    "float32": Trial(None),
    "float32, b1 0.9": Trial(None, b1=0.9),
    "ternary": Trial("ternary"),
    "sign": Trial("sign"),
    "sign, b1 0.65": Trial("sign", b1=0.65),
    "largest of 7": Trial(SEVEN),
    "float32, half of the coordinates by turns": Trial(None, turns=2),
    "ternary, half of the coordinates by turns": Trial("ternary", turns=2),
    "sign, half of the coordinates by turns": Trial("sign", turns=2),
    "float32, half by turns, b1 0.6": Trial(None, turns=2, b1=0.6),
    "float32, half by turns, b1 0.4": Trial(None, turns=2, b1=0.4),
    "ternary, half by turns, b1 0.6": Trial("ternary", turns=2, b1=0.6),
    "largest of 7, its mean in signs": Trial(SEVEN, "sign"),
    "signs, their mean as largest of 7": Trial("sign", SEVEN),
    "largest of 7, what the mean loses waits": Trial(SEVEN, mean_waits=1.0),
    "largest of 7, half of it waits": Trial(SEVEN, mean_waits=0.5),
    "largest of 7, nothing forgotten": Trial(SEVEN, forgotten=0.0),
    "largest of 7, all that may be forgotten": Trial(SEVEN, forgotten=1.0),
    "largest of 7, b2 0.98": Trial(SEVEN, b2=0.98),
    "largest of 7, b1 0.9": Trial(SEVEN, b1=0.9),
    "largest of 7, b1 0.65": Trial(SEVEN, b1=0.65),
    "largest of 7, b1 0.5": Trial(SEVEN, b1=0.5),
    "largest of 7, b1 0.6 before and 0.5 after": Trial(SEVEN, b1=0.6, after=0.5),
    "largest of 7 of what is new": Trial(SEVEN, predicted=0.8, forgotten=1.0),
    "largest of 7, half predicted": Trial(SEVEN, predicted=0.4),
    "ternary of what is new": Trial("ternary", predicted=0.8, forgotten=1.0),
    "float32 of what is new": Trial(None, predicted=0.8),
    "rank 8, the rest ternary": Trial("ternary", rank=8),
    "rank 32, the rest ternary": Trial("ternary", rank=32),
    "largest of 31": Trial(THIRTY_ONE),
    "largest of 31, b1 0.65": Trial(THIRTY_ONE, b1=0.65),
}
