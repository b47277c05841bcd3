#!/usr/bin/env bash
# Two processes of one run by hand, here on one machine, two workers each. On two machines
# start one line on each, with the first one's address in place of localhost. From the
# root of the repository:
#
#   examples/launch/two_processes.sh PROGRAM [OPTIONS]
#
# PROGRAM is cifar10, bert or swin, or a module or a file with the options of
# examples.train.
#
# SIGTERM to this script, or to either process, saves at the same step in both and leaves
# with status 143; the same command resumes from there. If one dies, the other ends
# within about --timeout, if one hangs, both do after --step-timeout, and both are started
# again from the last checkpoint, up to three times (restart.sh has the rule). --out must be on a disk that both see.
set -euo pipefail
[ -d examples/launch ] || { echo "start it from the root of the repository" >&2; exit 2; }
. examples/launch/restart.sh
command_of "${1:?the program: cifar10, bert, swin, a module or a .py}"
shift
port=${PORT:-29400}
processes=()
stopped=no
trap 'stopped=yes; kill -TERM "${processes[@]}" 2>/dev/null || true' TERM INT

run() { # both, to their end; sets the status
  processes=()
  for id in 0 1; do
    "${command[@]}" --workers 4 "$@" \
      --coordinator "localhost:$port" --process-id "$id" --num-processes 2 &
    processes+=($!)
  done
  status=0
  for process in "${processes[@]}"; do
    while true; do # a signal ends the wait, but not yet the process
      wait "$process" && code=0 || code=$?
      kill -0 "$process" 2>/dev/null || break
    done
    [ "$code" -eq 0 ] || status=$code
  done
}

run "$@"
for again in 1 2 3; do
  if [ "$stopped" = yes ] || ! lost "$status"; then break; fi
  echo "status $status: both start again (time $again of 3)" >&2
  run "$@"
done
exit "$status"
