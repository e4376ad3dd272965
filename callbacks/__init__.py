"""Callbacks: when a run is saved, stopped, shown and summarised."""

from callbacks.base import Callback
from callbacks.early_stopping import EarlyStopping
from callbacks.interval import Interval, Progress
from callbacks.learning_rate_monitor import LearningRateMonitor
from callbacks.model_checkpoint import ModelCheckpoint
from callbacks.model_summary import ModelSummary
from callbacks.monitor import Monitor
from callbacks.progress_bar import ProgressBar

__all__ = [
    "Callback",
    "EarlyStopping",
    "Interval",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "Monitor",
    "Progress",
    "ProgressBar",
]
