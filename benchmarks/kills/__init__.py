"""What the loss of a process costs a run: steps, seconds, and its momentum."""
