# The one rule for starting a run again, for the scripts beside this file to source.
#
# lost STATUS: whether a process of the run died or hung, so that all of them start again
# from the last checkpoint. 75: a process ended itself because another one was lost. 137: a
# process was killed. 134: a process aborted, as jax does when process 0 is lost.
lost() {
  case "$1" in
    75 | 134 | 137) return 0 ;;
    *) return 1 ;;
  esac
}
