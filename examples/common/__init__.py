"""What the programs share: one loop, one simulated loop, options, input, records."""

AXIS = "data"  # the mesh axis of the workers
