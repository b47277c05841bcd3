"""What users would pick instead, as optax transformations.

Each takes a worker's own gradient and exchanges over an axis by itself, as the
optimizers of ``slamb_jax`` do.
"""

from benchmarks.rivals.chains import demo as demo
from benchmarks.rivals.chains import dgc as dgc
from benchmarks.rivals.chains import diloco as diloco
from benchmarks.rivals.chains import distributed_lion as distributed_lion
from benchmarks.rivals.chains import muloco as muloco
from benchmarks.rivals.chains import one_bit_adam as one_bit_adam
from benchmarks.rivals.chains import one_bit_lamb as one_bit_lamb
from benchmarks.rivals.chains import powersgd as powersgd
from benchmarks.rivals.chains import signsgd as signsgd
from benchmarks.rivals.chains import slamb as slamb
from benchmarks.rivals.chains import sparseloco as sparseloco
from benchmarks.rivals.dense import dense as dense
from benchmarks.rivals.dense import dense_bfloat16 as dense_bfloat16
from benchmarks.rivals.dense import elements as elements
from benchmarks.rivals.dion2 import dion2 as dion2
