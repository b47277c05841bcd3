"""What a user would pick instead of SLAMB, as optax transformations.

Each takes a worker's own gradient and exchanges over ``axis_name`` by itself, as
``slamb_jax.slamb`` does, and has beside it a function that tells the bytes each worker
sends at a step.
"""

from benchmarks.rivals.demo import demo as demo
from benchmarks.rivals.demo import demo_bytes as demo_bytes
from benchmarks.rivals.dense import averaged as averaged
from benchmarks.rivals.dense import averaged_bytes as averaged_bytes
from benchmarks.rivals.diloco import diloco as diloco
from benchmarks.rivals.diloco import diloco_bytes as diloco_bytes
from benchmarks.rivals.one_bit_lamb import one_bit_lamb as one_bit_lamb
from benchmarks.rivals.one_bit_lamb import one_bit_lamb_bytes as one_bit_lamb_bytes
from benchmarks.rivals.powersgd import powersgd as powersgd
from benchmarks.rivals.powersgd import powersgd_bytes as powersgd_bytes
from benchmarks.rivals.sparseloco import sparseloco as sparseloco
from benchmarks.rivals.sparseloco import sparseloco_bytes as sparseloco_bytes
from benchmarks.rivals.topk import topk_bytes as topk_bytes
from benchmarks.rivals.topk import topk_with_error_feedback as topk_with_error_feedback
