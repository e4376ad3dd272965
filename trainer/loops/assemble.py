"""Turning a Trainer's arguments and a user's module into what the loops work with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from trainer.accelerator import Accelerator
from trainer.data.loader import Feed
from trainer.distributed.collectives import all_gather_object
from trainer.errors import choose
from trainer.hooks import is_overridden
from trainer.loops.lengths import apply_limit
from trainer.module import TrainModule
from trainer.optim.configure import SchedulerEntry, read_optimizers
from trainer.optim.optimizer import AcceleratedOptimizer
from trainer.strategies.ddp import average_gradients

# what a phase needs of the module, and where its data may come from
_STEPS = {
    "fit": ("training_step", "train_dataloader", "train_dataloaders"),
    "validate": ("validation_step", "val_dataloader", "dataloaders"),
    "test": ("test_step", "test_dataloader", "dataloaders"),
    "predict": ("predict_step", "predict_dataloader", "dataloaders"),
}


def check_module(module: Any, stage: str) -> None:
    """Refuse a module that cannot do what is asked of it.

    Raises:
        TypeError: It is no `TrainModule`, or does not define the step.
    """
    if not isinstance(module, TrainModule):
        raise TypeError(
            f"{stage} was given {module!r} of type {type(module).__name__}; it needs a "
            "TrainModule. Subclass trainer.TrainModule and define its steps."
        )
    needed = [_STEPS[stage][0]] if stage != "predict" else []
    if stage == "fit":
        needed.append("configure_optimizers")
    for name in needed:
        if not is_overridden(module, name, TrainModule):
            raise TypeError(
                f"{type(module).__name__} does not define {name}, which {stage} needs: "
                f"def {name}(self{', batch, batch_idx' if name.endswith('_step') else ''})."
            )


def loaders_for(stage: str, given: Any, module: TrainModule, datamodule: Any) -> list[Any]:
    """The loaders of a phase: those given, else the datamodule's, else the module's.

    Args:
        stage: fit, validate, test or predict.
        given: A loader or a list of them, or None.
        module: The user's.
        datamodule: An object with loader hooks, or None.

    Returns:
        A list; empty where there are none.

    Raises:
        ValueError: Loaders were given twice, or there are none though the phase needs them.
    """
    _, hook, argument = _STEPS[stage]
    loaders = find_loaders(hook, given, module, datamodule, argument)
    if not loaders:
        raise ValueError(
            f"{stage} has no data: pass {argument}, or a datamodule, or define {hook} in "
            f"{type(module).__name__}."
        )
    return loaders


def find_loaders(
    hook: str, given: Any, module: TrainModule, datamodule: Any, argument: str
) -> list[Any]:
    """See `loaders_for`; no loaders are fine here."""
    if given is not None and datamodule is not None:
        raise ValueError(f"Pass {argument} or datamodule, not both.")
    if given is None and datamodule is not None:
        given = call_if_there(datamodule, hook)
    if given is None:
        given = getattr(module, hook)()
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) and _holds_loaders(given) else [given]


def _holds_loaders(given: Sequence[Any]) -> bool:
    """A list of loaders, rather than a list of ready batches that is one loader itself."""
    return all(hasattr(one, "__iter__") and not hasattr(one, "shape") for one in given) and not all(
        isinstance(one, (list, tuple, dict)) for one in given
    )


def call_if_there(owner: Any, name: str, *args: Any) -> Any:
    """Call a method of an object that may lack it, as a datamodule may."""
    method = getattr(owner, name, None)
    return None if method is None else method(*args)


def make_feed(
    loader: Any,
    accelerator: Accelerator,
    *,
    seed: int,
    shuffle: bool,
    limit: int | float | None,
    limit_name: str,
) -> Feed:
    """The feed of one loader, within its limit."""
    feed = Feed(
        loader,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        seed=seed,
        shuffle=shuffle,
    )
    apply_limit(feed, limit_name, limit)
    return feed


def check_same_length(feed: Feed, what: str) -> None:
    """Refuse a loader that has another length on another process, before anything hangs on it.

    Raises:
        ValueError: On all processes alike, giving the lengths.
    """
    lengths = all_gather_object(feed.num_batches)
    if any(length != lengths[0] for length in lengths):
        raise ValueError(
            f"The {what} loader has another number of batches on each process: "
            f"{', '.join(f'rank {r}: {n}' for r, n in enumerate(lengths))}. Give every process the "
            "same dataset; it is shared out here."
        )


def prepare_optimizers(
    module: TrainModule, accelerator: Accelerator
) -> tuple[list[AcceleratedOptimizer], list[SchedulerEntry]]:
    """Call ``configure_optimizers`` and prepare what it returned.

    In manual optimisation among several processes each optimizer averages its own gradients.
    """
    optimizers, schedulers = read_optimizers(module.configure_optimizers())
    alone = module.automatic_optimization or not accelerator.use_distributed
    reduce: Callable[[Any], None] | None = None if alone else average_gradients
    prepared = [
        AcceleratedOptimizer(optimizer, precision=accelerator.precision, reduce=reduce)
        for optimizer in optimizers
    ]
    _check_trained(module, prepared)
    return prepared, schedulers


def _check_trained(module: nn.Module, optimizers: list[AcceleratedOptimizer]) -> None:
    """An optimizer over tensors that are not the module's would train nothing."""
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        groups = optimizer.param_groups
        if not any(id(parameter) in own for group in groups for parameter in group["params"]):
            raise ValueError(
                f"configure_optimizers returned a {type(optimizer.optimizer).__name__} that has "
                f"none of the parameters of {type(module).__name__}; pass self.parameters()."
            )


def check_ckpt_path(ckpt_path: Any, project_dir: Any) -> None:
    """Refuse ``"auto"`` and its like where there is no fixed folder to look in.

    Raises:
        ValueError: The folder would be a new one.
    """
    if ckpt_path in ("auto", "last", "best") and project_dir is None:
        raise ValueError(
            f"ckpt_path={ckpt_path!r} looks for the checkpoints of an earlier start, but without "
            "project_dir every start has a new folder. Pass Trainer(project_dir='runs/…')."
        )
    if isinstance(ckpt_path, str) and ckpt_path == "":
        raise ValueError(choose("ckpt_path", ckpt_path, ("auto", "best", "last")))
