"""Engines: how modules are placed and run, and how gradients are averaged over the processes.

There is one engine for a single device, and there are several for data parallelism (DDP). Each has
the methods of `base.Engine`; `single.SingleDevice` is the simplest one.
"""
