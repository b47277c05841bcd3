"""What a user would pick instead of SLAMB, as optax transformations.

Each takes a worker's own gradient and exchanges over ``axis_name`` by itself, as
``slamb_jax.slamb`` does, and has beside it a function that lists the collectives of
step t = 1, 2, ... and the bytes that each worker puts in.
"""

from benchmarks.rivals.demo import demo as demo
from benchmarks.rivals.demo import demo_sends as demo_sends
from benchmarks.rivals.dense import averaged as averaged
from benchmarks.rivals.dense import averaged_sends as averaged_sends
from benchmarks.rivals.diloco import diloco as diloco
from benchmarks.rivals.diloco import diloco_sends as diloco_sends
from benchmarks.rivals.exchange import Sends as Sends
from benchmarks.rivals.exchange import wire_bytes as wire_bytes
from benchmarks.rivals.one_bit_lamb import one_bit_lamb as one_bit_lamb
from benchmarks.rivals.one_bit_lamb import one_bit_lamb_sends as one_bit_lamb_sends
from benchmarks.rivals.powersgd import powersgd as powersgd
from benchmarks.rivals.powersgd import powersgd_sends as powersgd_sends
from benchmarks.rivals.sparseloco import sparseloco as sparseloco
from benchmarks.rivals.sparseloco import sparseloco_sends as sparseloco_sends
from benchmarks.rivals.topk import topk_sends as topk_sends
from benchmarks.rivals.topk import topk_with_error_feedback as topk_with_error_feedback
