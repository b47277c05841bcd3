#!/usr/bin/env bash
# Measurements that need a GPU, in under 30 minutes on one H100: benchmarks/gpu.sh [FOLDER]
# In an environment with the extra "test" and jax's CUDA build. Each part is stopped at its
# limit and its output kept in the folder, so that finished parts are there.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results/gpu}
mkdir -p "$out"
export JAX_PLATFORMS=cuda,cpu PYTHONUNBUFFERED=1

part() { # name, seconds, command
  local name=$1 limit=$2
  shift 2
  printf '\n== %s (%d s)\n' "$name" "$SECONDS"
  timeout "$limit" "$@" 2>&1 | tee "$out/$name.txt"
  echo "$name: exit ${PIPESTATUS[0]}" | tee -a "$out/parts.txt"
}

python - <<'END' || exit 1
import jax
device = jax.devices()[0]
assert device.platform == "gpu", f"the first device is {device}, not a GPU"
print(device.device_kind, "jax", jax.__version__)
END
rm -f "$out/parts.txt"

# Times of the update, with passes and the share of the bandwidth that they take.
part step-base 120 python -m benchmarks.step --model bert-base --rounds 20
part step-large 180 python -m benchmarks.step --model bert-large --rounds 20
# With the exchange, eight workers' codes on one device.
part exchange-base 180 python -m benchmarks.step --model bert-base --workers 8 --rounds 10
# The laws, where one device is enough: under vmap, and of simulated workers.
laws=(accumulate average bfloat16 budget codes finite links mean momentum rivals
  selections simulate slamb)
JAX_DISABLE_MOST_OPTIMIZATIONS=0 part tests 420 python -m pytest -q -n 4 \
  -k "not shard_map and not pmap" $(printf 'tests/test_%s.py ' "${laws[@]}")
part main-job 180 python -m examples.byte_lm.main --out "$out/byte_lm"
# 50 M parameters, 2,000 steps: one line for each run, and the next call goes on.
part huge 600 python -m benchmarks.frontier --grid huge --only AdamW --only "adamw, H 1" \
  --budget 420 --out "$out"
# The optimization track, where its tokens are: hours for a run, which goes on likewise.
if [ -d data/fineweb10B ]; then
  part track "${TRACK_SECONDS:-600}" python -m benchmarks.frontier --grid track \
    --out "$out"
fi
