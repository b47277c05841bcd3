"""Shared by the programs: a loop, a simulated loop, options, input, records."""

AXIS = "data"  # the mesh axis of the workers
