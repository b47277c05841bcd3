"""What every part of the library stands on; it sends nothing."""
