"""Engines: how the module runs, and how its gradients become those of all processes.

Each has the methods of `single.SingleDevice`, which is the one that does least.
"""
