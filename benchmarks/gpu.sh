#!/usr/bin/env bash
# What needs a GPU, in one call of at most 540 s on a machine with one H100:
#   benchmarks/gpu.sh [FOLDER]            all parts; output in FOLDER, or build/gpu
#   benchmarks/gpu.sh --tiny [FOLDER]     the same on a CPU, in tiny sizes
#   benchmarks/gpu.sh --wheels [PYTHON]   fills build/wheels for a Python such as 3.12
# The machine's python3 needs jax with CUDA, flax and numpy. It needs no network: the rest
# is installed from build/wheels, where that folder is. The most telling part is first,
# each is stopped at its limit, and a second call with the same folder goes on with the
# frontier. FOLDER/summary.txt has each part's exit status and seconds; the script's own
# says whether all ended well.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
wheels=build/wheels
needed=(optax chex rich tyro pytest pytest-xdist hypothesis scikit-learn matplotlib
  tensorboardX pyyaml)

if [ "${1:-}" = --wheels ]; then
  version=${2:-$(python3 -c 'import platform; print(platform.python_version())')}
  rm -rf "$wheels"
  python3 -m pip download -q -d "$wheels" --only-binary=:all: --python-version "$version" \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    "jax>=0.11" "${needed[@]}" || exit 1
  # What comes with jax, and is large.
  rm -f "$wheels"/{jax,jaxlib,numpy,scipy,ml_dtypes,opt_einsum}-*.whl
  du -sh "$wheels"
  exit
fi

# Sizes for a GPU, or tiny ones for a CPU, which may be shared and gets four times as long.
platform=gpu large=bert-large scanned=bert-large-scanned exchanged=bert-base-scanned
rounds=20 processes=8 grid=huge budget=170 times=1 unoptimized=0
export JAX_PLATFORMS=cuda,cpu
if [ "${1:-}" = --tiny ]; then
  shift
  platform=cpu large=bert-tiny scanned=bert-tiny-scanned exchanged=bert-tiny-scanned
  rounds=3 processes=1 grid=tiny budget=120 times=4 unoptimized=1
  export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=1
fi
out=${1:-build/gpu}
mkdir -p "$out"
: >"$out/summary.txt"
failed=0

part() { # name, seconds, command
  local name=$1 limit=$((times * $2)) began=$SECONDS status
  shift 2
  printf '\n== %s, at most %d s\n' "$name" "$limit"
  timeout -k 2 "$limit" "$@" 2>&1 | tee "$out/$name.txt"
  status=${PIPESTATUS[0]}
  [ "$status" = 0 ] || failed=1
  echo "$name: exit $status after $((SECONDS - began)) s of $limit" |
    tee -a "$out/summary.txt"
}

start() {
  if [ -d "$wheels" ]; then
    python3 -m pip install -q --no-index --find-links "$wheels" "${needed[@]}" || return 1
  fi
  python3 -c "
import jax
device = jax.devices()[0]
print(device.device_kind, device.platform, 'jax', jax.__version__)
raise SystemExit(0 if device.platform == '$platform' else 3)"
}

part start 45 bash -c "wheels=$wheels platform=$platform needed=(${needed[*]})
$(declare -f start)
start"
if grep -q 'start: exit 3' "$out/summary.txt"; then
  echo "The first device is no $platform." >&2
  exit 1
fi
# (a) The update: ms, passes over the parameters, share of the bandwidth, temporaries. XLA
# compiles a SLAMB of 389 leaves for too long; layers that are scanned are 21.
part step 60 python3 -m benchmarks.step --model "$large" --rounds "$rounds" \
  --only adamw lamb
part scanned 45 python3 -m benchmarks.step --model "$scanned" --rounds "$rounds" \
  --only adamw "slamb, as published" lamb
# (b) With the exchange: eight simulated workers, whose codes one device makes and reads.
part exchange 60 python3 -m benchmarks.step --model "$exchanged" --rounds "$rounds" \
  --workers 8 --simulate --only adamw "adamw, in 4 bits" "slamb, as published"
# (c) The laws, as far as one device can break them.
laws=(
  tests/test_codes.py::test_codes_are_those_of_the_formula
  tests/test_platform.py::test_an_array_is_coded_in_groups
  tests/test_codes.py::test_zeros_stay_and_extremes_are_finite
  tests/test_mean.py::test_the_mean_of_what_was_sent_is_sent_again
  tests/test_mean.py::test_workers_steps_arrays_and_blocks_round_otherwise
  tests/test_mean.py::test_what_is_not_finite_reaches_all
  tests/test_links.py::test_the_mean_momentum_is_that_of_dense_adam
  tests/test_links.py::test_a_leaf_steps_as_by_itself
  tests/test_slamb.py::test_slamb_follows_the_recorded_run
  tests/test_slamb.py::test_one_worker_that_exchanges_all_is_optax_lamb
  tests/test_wrappers.py::test_a_skipped_step_might_as_well_not_have_been
  tests/test_mean.py::test_local_steps_end_at_the_minimum_of_the_mean
)
part laws 90 env XLA_PYTHON_CLIENT_PREALLOCATE=false \
  JAX_DISABLE_MOST_OPTIMIZATIONS=$unoptimized \
  python3 -m pytest -v -n "$processes" --dist worksteal \
  -k "not shard_map and not pmap" "${laws[@]}"
# (d) Losses at a size that CPUs do not reach: dense AdamW and the default, at two rates.
part frontier 225 env JAX_COMPILATION_CACHE_DIR="$PWD/build/jax_cache" \
  python3 -m benchmarks.train --grid "$grid" --budget "$budget" --out "$out"

echo "all: exit $failed after $SECONDS s" | tee -a "$out/summary.txt"
exit "$failed"
