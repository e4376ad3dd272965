"""Callbacks: checkpointing, early stopping, progress bars, monitoring and weight averaging."""

from callbacks.backbone_finetuning import BackboneFinetuning, BaseFinetuning
from callbacks.base import Callback
from callbacks.device_stats_monitor import DeviceStatsMonitor
from callbacks.early_stopping import EarlyStopping
from callbacks.garbage_collection import GarbageCollection
from callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from callbacks.gradient_norm_monitor import GradientNormMonitor
from callbacks.lambda_callback import LambdaCallback
from callbacks.learning_rate_monitor import LearningRateMonitor
from callbacks.memory_snapshot import MemorySnapshot
from callbacks.model_checkpoint import ModelCheckpoint
from callbacks.model_pruning import ModelPruning
from callbacks.model_summary import ModelSummary
from callbacks.monitor import Monitor
from callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from callbacks.prediction_writer import PredictionWriter
from callbacks.profiler import Profiler
from callbacks.progress_bar import ProgressBar
from callbacks.rich_progress_bar import RichProgressBar
from callbacks.slow_rank_detector import SlowRankDetector
from callbacks.spike_detection import SpikeDetection
from callbacks.stochastic_weight_averaging import StochasticWeightAveraging
from callbacks.throughput_monitor import ThroughputMonitor
from callbacks.timer import Timer
from callbacks.weight_averaging import EMA, WeightAveraging
from trainer.interval import Interval, Progress

__all__ = [
    "EMA",
    "BackboneFinetuning",
    "BaseFinetuning",
    "Callback",
    "DeviceStatsMonitor",
    "EarlyStopping",
    "GarbageCollection",
    "GradientAccumulationScheduler",
    "GradientNormMonitor",
    "Interval",
    "LambdaCallback",
    "LearningRateMonitor",
    "MemorySnapshot",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "Monitor",
    "OnExceptionCheckpoint",
    "PredictionWriter",
    "Profiler",
    "Progress",
    "ProgressBar",
    "RichProgressBar",
    "SlowRankDetector",
    "SpikeDetection",
    "StochasticWeightAveraging",
    "ThroughputMonitor",
    "Timer",
    "WeightAveraging",
]
