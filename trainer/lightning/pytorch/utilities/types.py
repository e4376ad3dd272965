"""Names for annotations."""

from typing import Any

STEP_OUTPUT = Any
EVAL_DATALOADERS = Any
TRAIN_DATALOADERS = Any
LRSchedulerTypeUnion = Any
OptimizerLRScheduler = Any
EPOCH_OUTPUT = Any
LRSchedulerConfig = dict[str, Any]
LRSchedulerConfigType = dict[str, Any]
LRSchedulerPLType = Any
LRSchedulerType = Any
LRSchedulerTypeTuple = Any
OptimizerConfig = dict[str, Any]
OptimizerLRSchedulerConfig = dict[str, Any]
_METRIC = Any
_DEVICE = Any
_EVALUATE_OUTPUT = Any
_MAP_LOCATION_TYPE = Any
_PARAMETERS = Any
_PATH = Any
_PREDICT_OUTPUT = Any
