"""Experiment trackers, which record a run's metrics. The import loads no tracker's SDK."""

from trackers.aim import AimTracker
from trackers.background import BackgroundTracker
from trackers.base import GeneralTracker
from trackers.clearml import ClearMLTracker
from trackers.comet import CometMLTracker
from trackers.csv import CSVTracker
from trackers.dvclive import DVCLiveTracker
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
from trackers.swanlab import SwanLabTracker
from trackers.tensorboard import TensorBoardTracker
from trackers.trackio import TrackioTracker
from trackers.wandb import WandBTracker

__all__ = [
    "AimTracker",
    "BackgroundTracker",
    "CSVTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "JsonlTracker",
    "MLflowTracker",
    "NullTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "available_trackers",
    "name_secrets",
    "read_metrics",
    "register_tracker",
    "resolve_trackers",
    "select_trackers",
]
