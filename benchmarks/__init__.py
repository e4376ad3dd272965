"""What the loop costs, measured against what one would use instead: see `benchmarks/README.md`."""
