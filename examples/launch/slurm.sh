#!/usr/bin/env bash
# One process for each GPU, found by jax through SLURM's environment. Two minutes before
# the time is up SLURM sends SIGTERM: the run saves, leaves with status 143, and the job
# is queued again and resumes; likewise, in the first 20 times, when a process died or hung
# (restart.sh has the rule). --out and --cache must be on a disk that all nodes see.
#
#   sbatch examples/launch/slurm.sh bert --config examples/bert/configs/large.yaml --files DIR
#   sbatch examples/launch/slurm.sh examples.train
#
#SBATCH --job-name=slamb
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=12
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
. examples/launch/restart.sh
command_of "${1:?the program: cifar10, bert, swin, a module or a .py}"
shift
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun bash -c 'exec "$@" --process-id "$SLURM_PROCID"' bash "${command[@]}" "$@" \
  --workers "$SLURM_NTASKS" --num-processes "$SLURM_NTASKS" \
  --coordinator "$host:$((61440 + SLURM_JOB_ID % 4096))"
status=$?
again=$((${SLURM_RESTART_COUNT:-0} < 20))
if [ "$status" -eq 143 ] || { lost "$status" && [ "$again" -eq 1 ]; }; then # 143: saved
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
