"""Optimizers and schedulers as prepared objects, clipping, and the weight of each micro-batch."""
