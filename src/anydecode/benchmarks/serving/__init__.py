"""Benchmarks of serving under real load: traces, their replay, and latency and goodput results."""
