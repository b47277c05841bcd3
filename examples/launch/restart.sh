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
# from the last checkpoint; on any status but 0 (to the end), 2 (wrong options), 130 and 143
# (stopped by a signal, and saved). A number of restarts bounds what an error costs that
# comes again each time.
lost() {
  case "$1" in
    0 | 2 | 130 | 143) return 1 ;;
    *) return 0 ;;
  esac
}
