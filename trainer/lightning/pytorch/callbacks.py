"""The names of ``lightning.pytorch.callbacks``."""

from callbacks import (
    Callback,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelPruning,
    ModelSummary,
    Timer,
)
from trainer.lightning.missing import getter
from trainer.lightning.pytorch._callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    LearningRateMonitor,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    RichProgressBarTheme,
    StochasticWeightAveraging,
    ThroughputMonitor,
    TQDMProgressBar,
    WeightAveraging,
)
from trainer.lightning.pytorch._model_checkpoint import ModelCheckpoint

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "Callback",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "RichModelSummary",
    "RichProgressBar",
    "RichProgressBarTheme",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
    "WeightAveraging",
]

__getattr__ = getter(__name__)
