"""Experiment trackers, which record a run's metrics. Importing this imports no tracker's SDK."""

from trackers.background import BackgroundTracker
from trackers.base import GeneralTracker
from trackers.comet import CometMLTracker
from trackers.csv import CSVTracker
from trackers.jsonl import JsonlTracker, read_metrics
from trackers.mlflow import MLflowTracker
from trackers.null import NullTracker
from trackers.redaction import name_secrets
from trackers.registry import (
    available_trackers,
    register_tracker,
    resolve_trackers,
    select_trackers,
)
from trackers.tensorboard import TensorBoardTracker
from trackers.wandb import WandBTracker

__all__ = [
    "BackgroundTracker",
    "CSVTracker",
    "CometMLTracker",
    "GeneralTracker",
    "JsonlTracker",
    "MLflowTracker",
    "NullTracker",
    "TensorBoardTracker",
    "WandBTracker",
    "available_trackers",
    "name_secrets",
    "read_metrics",
    "register_tracker",
    "resolve_trackers",
    "select_trackers",
]
