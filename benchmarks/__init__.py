"""Benchmarks of Cadence against plain PyTorch and other trainers: see `benchmarks/README.md`."""
