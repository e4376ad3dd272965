"""Accelerate's path of the launchers, see `trainer.launch.notebook`."""

from trainer.launch.notebook import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
