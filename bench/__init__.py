"""Benchmarks: problems, roofs, contenders."""
