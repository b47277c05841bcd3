#!/usr/bin/env bash
# As slurm.sh, for a run that goes on when a node is lost: the others start again at once,
# from the snapshots that each process keeps in the memory of its node. Ask for a node
# more than NODES, and it takes the lost one's place. Not yet run on a cluster.
#
#   NODES=16 sbatch examples/launch/slurm_elastic.sh bert --config examples/bert/configs/large.yaml --files DIR
#
#SBATCH --job-name=slamb
#SBATCH --nodes=17
#SBATCH --no-kill
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=12
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
. examples/launch/restart.sh
program=${1:?the program: cifar10, bert or swin}
shift
status=1

nodes_up() { # into the array up: as many as the run needs, of those of the job
  up=()
  for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    case $(sinfo --noheader --nodes "$node" --format %T | head -n 1) in
      allocated | mixed | completing) up+=("$node") ;;
    esac
  done
  up=("${up[@]:0:${NODES:-$SLURM_JOB_NUM_NODES}}")
}

# Each process has a folder of its own, by its place on the node: numbers of processes change.
task='exec python -m "examples.$0.main" "$@" --workers "$SLURM_NTASKS" --distributed \
  --snapshots "/dev/shm/slamb-$SLURM_JOB_ID/$SLURM_LOCALID"'
losses=0
while nodes_up && [ "${#up[@]}" -gt 0 ] && [ "$losses" -lt 20 ]; do
  before=${up[*]}
  srun --nodes "${#up[@]}" --nodelist "${before// /,}" --kill-on-bad-exit=0 \
    bash -c "$task" "$program" "$@"
  status=$?
  if [ "$status" -eq 143 ]; then # stopped by SIGTERM, and saved
    scontrol requeue "$SLURM_JOB_ID"
  fi
  nodes_up
  if [ "$status" -eq 0 ] || [ "$status" -eq 143 ]; then break; fi
  losses=$((losses + 1))
  if ! lost "$status" && [ "${up[*]}" = "$before" ]; then break; fi
done
exit "$status"
