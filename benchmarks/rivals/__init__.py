"""Optimizers that users would pick instead, as optax transformations.

Each takes a worker's own gradient and exchanges over ``axis_name`` by itself, as the
optimizers of ``slamb_jax`` do; a :class:`Rival` has the collectives of its steps beside
it.
"""

from benchmarks.rivals.demo import demo as demo
from benchmarks.rivals.dion2 import dion2 as dion2
from benchmarks.rivals.exchange import Rival as Rival
from benchmarks.rivals.exchange import Sends as Sends
from benchmarks.rivals.exchange import dense as dense
from benchmarks.rivals.exchange import dense_bfloat16 as dense_bfloat16
from benchmarks.rivals.exchange import elements as elements
from benchmarks.rivals.exchange import mean_sends as mean_sends
from benchmarks.rivals.exchange import wire_bytes as wire_bytes
from benchmarks.rivals.one_bit_lamb import one_bit_lamb as one_bit_lamb
from benchmarks.rivals.powersgd import powersgd as powersgd
from benchmarks.rivals.sparseloco import sparseloco as sparseloco
