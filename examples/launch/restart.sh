# What the scripts beside this file share; they source it.

# command_of PROGRAM: sets the array command, to run an example by its name, a module or a
# file.
command_of() {
  case "$1" in
    *.py) command=(python "$1") ;;
    *.*) command=(python -m "$1") ;;
    *) command=(python -m "examples.$1.main") ;;
  esac
}

# lost STATUS: whether a process of the run died or hung, so that all of them start again
# from the last checkpoint. 75: a process ended itself because another one was lost. 137: a
# process was killed. 134: a process aborted, as jax does when process 0 is lost.
lost() {
  case "$1" in
    75 | 134 | 137) return 0 ;;
    *) return 1 ;;
  esac
}
