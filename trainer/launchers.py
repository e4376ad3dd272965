"""The launchers under accelerate's module path; see `trainer.launch.notebook`."""

from trainer.launch.notebook import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
