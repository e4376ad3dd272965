"""Each parameter of Lightning's public classes and functions is taken here, or refused by name.

``lightning_signatures.json`` has them, written by ``lightning_signatures.py``.
"""

from __future__ import annotations

import inspect
import json
from fnmatch import fnmatch
from importlib import import_module
from typing import Any

import pytest

import trainer.lightning as L
from tests.moving.lightning_signatures import FILE, parameters
from trainer.lightning.pytorch import callbacks, loggers, profilers, strategies

SIGNATURES: dict[str, list[str]] = json.loads(FILE.read_text())

ABSENT = {
    "pytorch.*.remove_ignored_hparams": "save_hyperparameters does it itself",
    "pytorch.LightningDataModule.load_from_checkpoint": "checkpoints do not hold its arguments",
    "pytorch.*.on_*_model_*": "refused as a hook that nobody calls",
    "pytorch.*.configure_sharded_model": "refused as a hook that nobody calls",
    "pytorch.LightningModule.to_tensorrt": "torch_tensorrt compiles what to_torchscript returns",
    "pytorch.callbacks.BaseFinetuning.f*": "freeze and unfreeze_and_add_param_group do it",
    "pytorch.callbacks.GradientAccumulationScheduler.*": "internal: it reads its dict",
    "pytorch.callbacks.ModelCheckpoint.*": "internal, or refused: folders are named by the update",
    "pytorch.callbacks.ModelPruning.sanitize_parameters_to_prune": "internal",
    "pytorch.callbacks.*ModelSummary.summarize": "str(utilities.model_summary.summarize(model))",
    "pytorch.callbacks.*ProgressBar.*": "a bar has get_metrics; refresh_rate=0 shows none",
    "pytorch.callbacks.StochasticWeightAveraging.*": "internal: avg_fn= is the average",
    "pytorch.callbacks.Timer.*_time": "time_elapsed and time_remaining are what it measures",
    "pytorch.callbacks.progress.rich_progress.*": "columns of a bar that is drawn otherwise",
    "pytorch.cli.instantiate_module": "load_from_checkpoint is how modules are made",
    "pytorch.core.optimizer.*": "internal",
    "pytorch.demos.SimpleLSTM.init_weights": "internal",
    "pytorch.demos.Transformer.generate_square_subsequent_mask": "nn.Transformer has it",
    "pytorch.demos.WikiText2.download": "nothing is downloaded",
    "pytorch.demos.boring_classes.*": "for Lightning's own tests",
    "pytorch.demos.mnist_datamodule.*": "as in LightningDataModule",
    "pytorch.loggers.*.after_save_checkpoint": "refused as a method that nobody calls",
    "pytorch.loggers.*.log_graph": "no graphs are drawn there",
    "pytorch.loggers.WandbLogger.*_artifact": "logger.experiment, the run, has it",
    "pytorch.loggers.logger.*": "internal",
    "pytorch.profilers.*": "profile(name) names a block in traces",
    "pytorch.strategies.*": "the Trainer's own work",
    "pytorch.utilities.CombinedLoader.reset": "iter() begins anew",
}
"""What is missing and has no error of its own, with the reason."""

CALLED_BY_POSITION = {"pl_module": "module", "state_dict": "state", "batch_nb": "batch_idx"}
"""Parameters of hooks, which only a Trainer calls."""

OTHERWISE = {
    "pytorch.callbacks.LambdaCallback": "functions by name: see below",
    "pytorch.loggers.CometLogger": "passed on: see below",
    "pytorch.loggers.WandbLogger.watch": "refused: a callback logs the norms",
    "pytorch.profilers.PyTorchProfiler.*": "a callback, which the Trainer calls",
    "pytorch.strategies.*": "by name only, and refused by name: see below",
    "pytorch.utilities.rank_zero*info": "stacklevel is for logging",
    "pytorch.utilities.rank_zero*debug": "stacklevel is for logging",
}
"""What takes its parameters in another way."""


def matches(path: str, table: dict[str, str]) -> bool:
    return any(fnmatch(path, pattern) for pattern in table)


def ours(path: str) -> Any:
    """Return what is here under a path of Lightning, without a bound first parameter."""
    parts = path.split(".")
    end = next(n for n, part in enumerate(parts) if part[0].isupper() or n == len(parts) - 1)
    owner, found = None, import_module(f"trainer.lightning.{'.'.join(parts[:end])}")
    for name in parts[end:]:
        owner, found = found, getattr(found, name)
    return owner, found


def test_each_parameter_of_lightning_is_taken_or_refused():
    wrong = []
    for path, theirs in SIGNATURES.items():
        try:
            owner, found = ours(path)
        except AttributeError as error:
            if not matches(path, ABSENT):
                wrong.append(f"{path} is missing: {error}")
            continue
        except ImportError as error:
            if "is not in Cadence" not in str(error):
                wrong.append(f"{path} is refused without a reason: {error}")
            continue
        if matches(path, OTHERWISE):
            continue
        own = parameters(found.__init__ if inspect.isclass(found) else found)
        static = inspect.isclass(owner) and inspect.getattr_static(owner, path.rpartition(".")[2])
        if inspect.isclass(found) or inspect.isfunction(static):
            own = own[1:]
        own, wanted = ([CALLED_BY_POSITION.get(each, each) for each in x] for x in (own, theirs))
        by_position = [each for each in wanted if each[0] != "*"]
        if own[: len(by_position)] != by_position:
            wrong.append(f"{path}: by position {own} instead of {wanted}")
        if missing := {each.lstrip("*") for each in wanted} - {each.lstrip("*") for each in own}:
            wrong.append(f"{path} has no {', '.join(sorted(missing))}")
    assert not wrong, "\n".join(wrong)


def test_no_exception_of_these_tables_is_unused():
    def missing(path: str) -> bool:
        try:
            ours(path)
        except AttributeError:
            return True
        except ImportError:
            return False
        return False

    gone = [path for path in SIGNATURES if missing(path)]
    unused = [each for each in ABSENT if not any(fnmatch(path, each) for path in gone)]
    unused += [each for each in OTHERWISE if not any(fnmatch(path, each) for path in SIGNATURES)]
    assert not unused


REFUSED: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (L.Trainer, {"accelerator": "cpu"}, {
        "plugins": ["io"], "model_registry": "name", "enable_autolog_hparams": False,
    }),
    (callbacks.ThroughputMonitor, {}, {"length_fn": len}),
    (loggers.TensorBoardLogger, {"save_dir": "x"}, {
        "log_graph": True, "prefix": "p", "sub_dir": "s",
    }),
    (loggers.CSVLogger, {"save_dir": "x"}, {"prefix": "p"}),
    (loggers.CometLogger, {}, {"prefix": "p"}),
    (loggers.MLFlowLogger, {}, {"prefix": "p", "log_model": True}),
    (loggers.WandbLogger, {}, {"prefix": "p", "log_model": True, "experiment": object()}),
    (profilers.PyTorchProfiler, {}, {"emit_nvtx": True, "schedule": int, "activities": [1]}),
    *(
        (kind, {}, {name: object() for name in SIGNATURES[f"pytorch.strategies.{kind.__name__}"]
                    if name not in inspect.signature(kind).parameters})
        for kind in (strategies.SingleDeviceStrategy, strategies.DDPStrategy,
                     strategies.FSDPStrategy)
    ),
    (strategies.DeepSpeedStrategy, {}, {"nvme_path": "x", "remote_device": "nvme"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "needed", "name", "value"),
    [
        pytest.param(call, needed, name, value, id=f"{call.__name__}-{name}")
        for call, needed, refused in REFUSED
        for name, value in refused.items()
    ],
)
def test_what_is_not_taken_is_refused_by_name_with_a_reason(call, needed, name, value):
    with pytest.raises((TypeError, ValueError), match=rf"{name}.*[:;] \w+ "):
        call(**needed, **{name: value})


def test_parameters_that_are_passed_on_arrive():
    heard: list[str] = []
    for name in SIGNATURES["pytorch.callbacks.LambdaCallback"]:
        made: Any = callbacks.LambdaCallback(**{name: lambda *_: heard.append("called")})
        getattr(made, name)(None, None, None)
        assert heard.pop() == "called"
    names = [name.lstrip("*") for name in SIGNATURES["pytorch.loggers.CometLogger"]]
    given = {name: name for name in names if name not in ("prefix", "project")}
    assert loggers.CometLogger(**given).init_kwargs == given
    for name in SIGNATURES["pytorch.strategies.DeepSpeedStrategy"]:
        if name in strategies._IN_ZERO:
            plugin = strategies.DeepSpeedStrategy(**{name: 123}).arguments["deepspeed_plugin"]
            assert plugin.deepspeed_config["zero_optimization"][name] == 123
