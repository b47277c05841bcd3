"""Transformations that wrap an optimizer."""
