"""The names that users import are these, and each says what it is for.

A change of a list here is a change of the public surface: CHANGELOG.md tells of it as well.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import callbacks
import trackers
import trainer

PUBLIC: dict[str, list[str]] = {
    "callbacks": [
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
    ],
    "trackers": [
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
    ],
    "trainer": [
        "AORecipeKwargs",
        "Accelerator",
        "AcceleratorState",
        "AutocastKwargs",
        "CheckpointError",
        "CombinedLoader",
        "DDPCommunicationHookType",
        "DataLoaderConfiguration",
        "DataModule",
        "DeepSpeedPlugin",
        "DistributedDataParallelKwargs",
        "DistributedOperationException",
        "DistributedType",
        "DynamoBackend",
        "FP8BackendType",
        "FP8RecipeKwargs",
        "FullyShardedDataParallelPlugin",
        "GradScalerKwargs",
        "GradientAccumulationPlugin",
        "GradientState",
        "InitProcessGroupKwargs",
        "KwargsHandler",
        "LocalSGD",
        "LoggerType",
        "MSAMPRecipeKwargs",
        "MegatronLMPlugin",
        "MetricError",
        "ParallelismConfig",
        "PartialState",
        "PipelineParallel",
        "PrecisionType",
        "Preempted",
        "ProfileKwargs",
        "ProjectConfiguration",
        "RNGType",
        "TERecipeKwargs",
        "TorchDynamoPlugin",
        "TorchTensorParallelPlugin",
        "TrainModule",
        "Trainer",
        "Tuner",
        "cpu_offload",
        "cpu_offload_with_hook",
        "debug_launcher",
        "disk_offload",
        "dispatch_model",
        "find_executable_batch_size",
        "gather_object",
        "get_logger",
        "infer_auto_device_map",
        "init_empty_weights",
        "init_on_device",
        "load_checkpoint_and_dispatch",
        "load_checkpoint_in_model",
        "notebook_launcher",
        "prepare_pippy",
        "release_memory",
        "set_seed",
        "skip_first_batches",
        "synchronize_rng_states",
    ],
}

each_package = pytest.mark.parametrize(
    "package", [callbacks, trackers, trainer], ids=lambda package: package.__name__
)


def order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, each by the alphabet."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def own_documentation(thing: Any) -> str:
    """Return the docstring that its author wrote; a dataclass makes one that does not count."""
    text = (thing.__doc__ or "").strip()
    return "" if text.startswith(f"{thing.__name__}(") else text


def undocumented(package: ModuleType) -> list[str]:
    """Return the public classes and functions, and public methods, that have no docstring."""
    missing = []
    for name in package.__all__:
        thing = getattr(package, name)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        if not own_documentation(thing):
            missing.append(name)
        if inspect.isclass(thing):
            missing += [
                f"{name}.{key}"
                for key, value in vars(thing).items()
                if inspect.isfunction(value)
                and not key.startswith("_")
                and not inspect.getdoc(getattr(thing, key))
            ]
    return missing


@each_package
def test_names_are_those_that_are_promised(package):
    names = package.__all__
    assert names == PUBLIC[package.__name__] == sorted(set(names), key=order)
    assert [name for name in names if not hasattr(package, name)] == []
    assert set(names) <= set(dir(package))  # for completion


@each_package
def test_every_name_is_documented(package):
    assert (package.__doc__ or "").strip()
    assert undocumented(package) == []


@each_package
def test_the_package_is_typed(package):
    from importlib.resources import files

    assert (files(package) / "py.typed").is_file()


def test_submodules_are_attributes_of_the_package_imported_alone():
    """As `accelerate.utils` is in scripts that import the package and nothing else."""
    code = "import trainer; trainer.utils.set_seed, trainer.state.PartialState, trainer.logging"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
