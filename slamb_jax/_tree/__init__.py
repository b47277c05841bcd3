"""The ground: mesh axes, leaves, checks, hashing. Imports nothing above it."""
