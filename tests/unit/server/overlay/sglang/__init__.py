"""A stand-in for the package sglang in tests; only its launcher exists."""
