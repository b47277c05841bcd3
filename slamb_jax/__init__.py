"""SLAMB for JAX: large-batch training that exchanges a tenth of its momentum."""

from slamb_jax import recipes as recipes
from slamb_jax._accumulate import AccumulateState as AccumulateState
from slamb_jax._accumulate import accumulate as accumulate
from slamb_jax._advice import Advice as Advice
from slamb_jax._advice import StepCost as StepCost
from slamb_jax._advise import advise as advise
from slamb_jax._agree import assert_replicas_agree as assert_replicas_agree
from slamb_jax._average import AverageParametersState as AverageParametersState
from slamb_jax._average import average_parameters as average_parameters
from slamb_jax._average import average_parameters_every as average_parameters_every
from slamb_jax._bfloat16 import TrainInBfloat16State as TrainInBfloat16State
from slamb_jax._bfloat16 import train_in_bfloat16 as train_in_bfloat16
from slamb_jax._checkpoint import Checkpoints as Checkpoints
from slamb_jax._checkpoint import Restored as Restored
from slamb_jax._compress import RandkCompressState as RandkCompressState
from slamb_jax._compress import (
    randk_compress_with_error_feedback as randk_compress_with_error_feedback,
)
from slamb_jax._distribution import project_distribution as project_distribution
from slamb_jax._distribution import update_distribution as update_distribution
from slamb_jax._finite import SkipNotFiniteState as SkipNotFiniteState
from slamb_jax._finite import check_finite as check_finite
from slamb_jax._finite import skip_not_finite as skip_not_finite
from slamb_jax._gradients import average_gradients as average_gradients
from slamb_jax._jointspar import JOINTSPAR_STATIC_ARGS as JOINTSPAR_STATIC_ARGS
from slamb_jax._jointspar import jointspar as jointspar
from slamb_jax._jointspar import jointspar_lars as jointspar_lars
from slamb_jax._layer_draws import JointSparState as JointSparState
from slamb_jax._layer_draws import active_layers as active_layers
from slamb_jax._layer_draws import layer_probabilities as layer_probabilities
from slamb_jax._leaves import Leaf as Leaf
from slamb_jax._momentum import MaskMomentumState as MaskMomentumState
from slamb_jax._momentum import mask_momentum as mask_momentum
from slamb_jax._natural import NaturalCompression as NaturalCompression
from slamb_jax._network import Network as Network
from slamb_jax._quantize import Quantizer as Quantizer
from slamb_jax._replicas import consolidate as consolidate
from slamb_jax._replicas import replicate as replicate
from slamb_jax._rescale import ElementwiseRescaleState as ElementwiseRescaleState
from slamb_jax._rescale import elementwise_rescale as elementwise_rescale
from slamb_jax._resize import resize as resize
from slamb_jax._selections import Bernoulli as Bernoulli
from slamb_jax._selections import ChosenRows as ChosenRows
from slamb_jax._selections import Permutation as Permutation
from slamb_jax._selections import Piecewise as Piecewise
from slamb_jax._selections import Selection as Selection
from slamb_jax._selections import Strided as Strided
from slamb_jax._selections import TopK as TopK
from slamb_jax._selections import replay_masks as replay_masks
from slamb_jax._shards import on_shards as on_shards
from slamb_jax._simulate import in_chunks as in_chunks
from slamb_jax._simulate import simulated_replicas as simulated_replicas
from slamb_jax._simulate import simulated_step as simulated_step
from slamb_jax._skip import train_if as train_if
from slamb_jax._slamb import STATIC_ARGS as STATIC_ARGS
from slamb_jax._slamb import slamb as slamb
from slamb_jax._timing import OptimizerSeconds as OptimizerSeconds
from slamb_jax._timing import measure_optimizers as measure_optimizers
from slamb_jax._trust_ratio import LayerwiseTrustRatioState as LayerwiseTrustRatioState
from slamb_jax._trust_ratio import layerwise_trust_ratio as layerwise_trust_ratio
from slamb_jax._uniform import StochasticUniform as StochasticUniform
from slamb_jax._watchdog import Watchdog as Watchdog
from slamb_jax._wire import Collective as Collective
from slamb_jax._wire import WireReport as WireReport
from slamb_jax._wire import wire_report as wire_report
from slamb_jax._worker_step import per_worker_step as per_worker_step

__version__ = "0.1.0"
