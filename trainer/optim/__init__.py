"""Prepared optimizers and schedulers, gradient clipping, and the weighting of micro-batches."""
