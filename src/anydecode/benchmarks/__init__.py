"""Benchmarks: everything that measures speed, memory or cost."""
