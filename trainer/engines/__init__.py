"""Engines: run the module and average its gradients over the processes.

There is one engine for a single device, and there are several for data parallelism (DDP). Each has
the methods of `base.Engine`; `single.SingleDevice` is the simplest one.
"""
