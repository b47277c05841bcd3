"""Wrong uses of everything public, in tables."""
