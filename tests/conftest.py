"""Fixtures of all tests."""

from tests.compiled import optimized as optimized
