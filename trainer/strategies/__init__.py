"""Engines: how the module runs, and how its gradients are averaged over the processes.

Each has the methods of `single.SingleDevice`, the simplest of them.
"""
