"""Benchmarks. `python -m benchmarks.round` measures a whole round; README.md says how, and what came out."""
