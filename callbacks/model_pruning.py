"""Prune parameters at the end of epochs, with ``torch.nn.utils.prune``."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import prune

from callbacks.base import Callback
from trainer.checks import check_choice, check_counts, check_numbers, choice_error, given
from trainer.errors import module_logger

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule

logger = module_logger(__name__)

_Part = tuple[nn.Module, str]
_METHODS: dict[Any, Any] = {
    "ln_structured": prune.LnStructured,
    "l1_unstructured": prune.L1Unstructured,
    "random_structured": prune.RandomStructured,
    "random_unstructured": prune.RandomUnstructured,
}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class ModelPruning(Callback):
    """Prune parameters at the end of epochs, with ``torch.nn.utils.prune``.

    During a run the parameters have torch's pruned form: ``weight_orig`` and the buffer
    ``weight_mask``, which begins as ones. Checkpoints have the same form, so that a run can resume.
    After a run, `make_pruning_permanent` restores the original names.

    Example::

        callback = ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.2)
        trainer = Trainer(max_epochs=10, callbacks=[callback])

    Args:
        pruning_fn: ``"l1_unstructured"``, ``"random_unstructured"``, ``"ln_structured"``,
            ``"random_structured"``, or a class of torch's `BasePruningMethod`.
        parameters_to_prune: Submodules with the names of their parameters; all if empty.
        parameter_names: Names of the parameters to prune in all submodules: ``"weight"``,
            ``"bias"`` or both.
        use_global_unstructured: Compare all parameters with each other, not only those of the same
            tensor.
        amount: The share or the number to prune, or a function of the epoch.
        apply_pruning: Whether to prune, or a function of the epoch that returns it.
        make_pruning_permanent: Whether to apply and remove the masks at the end.
        use_lottery_ticket_hypothesis: Whether to reset the remaining parameters to their initial
            values, or a function of the epoch that returns it.
        resample_parameters: Draw new random values instead, each time.
        pruning_dim: The dimension of structured methods.
        pruning_norm: The norm of ``"ln_structured"``.
        verbose: 1 logs the amount that is pruned, 2 also for each parameter.
        prune_on_train_epoch_end: False prunes after the validation instead.

    Raises:
        ValueError: An argument is missing or invalid.
        TypeError: A number has the wrong type.
    """

    PARAMETER_NAMES = ("weight", "bias")
    requires_unsharded = True

    def __init__(
        self,
        pruning_fn: Any,
        parameters_to_prune: Sequence[_Part] = (),
        parameter_names: list[str] | None = None,
        use_global_unstructured: bool = True,
        amount: int | float | Callable[[int], int | float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | float | str | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        for name in parameter_names or ():
            check_choice("parameter_names", name, self.PARAMETER_NAMES)
        check_counts(0, verbose=verbose)
        check_numbers(**given(pruning_dim=pruning_dim))
        self._method: Any = _METHODS.get(pruning_fn, pruning_fn)
        if prune.BasePruningMethod not in getattr(self._method, "__mro__", ()):
            choices = choice_error("pruning_fn", pruning_fn, _METHODS)
            raise ValueError(
                f"{choices} Or pass a subclass of torch.nn.utils.prune.BasePruningMethod."
            )
        accepted = inspect.signature(self._method).parameters
        self._kwargs: dict[str, Any] = {}
        for key, value in (("dim", pruning_dim), ("n", pruning_norm)):
            if key in accepted and value is not None:
                self._kwargs[key] = value
            elif key in accepted and pruning_fn in _METHODS:
                argument = "pruning_dim" if key == "dim" else "pruning_norm"
                raise ValueError(f"pruning_fn={pruning_fn!r} needs {argument}=.")
        if use_global_unstructured and self._method.PRUNING_TYPE != "unstructured":
            raise ValueError(
                f"pruning_fn={pruning_fn!r} is structured: set use_global_unstructured=False."
            )
        self._global = use_global_unstructured
        self._user_parameters = parameters_to_prune
        self._parameter_names = parameter_names or self.PARAMETER_NAMES
        self.amount = amount
        self._apply_pruning = apply_pruning
        self._make_pruning_permanent = make_pruning_permanent
        self._lottery = use_lottery_ticket_hypothesis
        self._resample_parameters = resample_parameters
        self._verbose = verbose
        self._on_train_epoch_end = prune_on_train_epoch_end
        self._parameters_to_prune: Sequence[_Part] = ()
        self._originals: dict[int, Any] = {}

    def filter_parameters_to_prune(self, parameters_to_prune: Sequence[_Part] = ()) -> Any:
        """Return the parameters to prune; override it to leave out some."""
        return parameters_to_prune

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Find the parameters and give them masks of ones, which a checkpoint can fill."""
        parameters = self._user_parameters or [
            (part, name)
            for name in self._parameter_names
            for part in module.modules()
            if part is not module and not isinstance(part, _CONTAINERS)
            if isinstance(getattr(part, name, None), nn.Parameter)
            or hasattr(part, f"{name}_mask")  # masks of an earlier run
        ]
        submodules = set(module.modules())
        for part, name in parameters:
            if part not in submodules or not hasattr(part, name):
                raise ValueError(
                    f"parameters_to_prune contains {name!r} of {part}, which the module does "
                    "not have."
                )
        self._parameters_to_prune = self.filter_parameters_to_prune(parameters)
        if stage == "fit":
            parts = {id(part): part for part, _ in self._parameters_to_prune}
            self._originals = {key: copy.deepcopy(part) for key, part in parts.items()}
        for part, name in self._parameters_to_prune:
            if not hasattr(part, f"{name}_mask"):
                prune.identity(part, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the initial values of the parameters, if they may be needed."""
        if not self._lottery or self._resample_parameters:
            return {}
        parts = [
            getattr(self._originals[id(part)], name) for part, name in self._parameters_to_prune
        ]
        return {"first": [tensor.detach() for tensor in parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the initial values of the run that is resumed."""
        saved = zip(self._parameters_to_prune, state.get("first", ()), strict=False)
        for (part, name), value in saved:
            getattr(self._originals[id(part)], name).data = value

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Prune."""
        if self._on_train_epoch_end:
            self._run_pruning(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Prune, if not at the end of the training epoch."""
        if not self._on_train_epoch_end and not trainer.sanity_checking:
            self._run_pruning(trainer)

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Remove the masks after the last checkpoint; pruned values stay zero."""
        if self._make_pruning_permanent:
            self.make_pruning_permanent(module)

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Remove the masks of a module; pruned values stay zero."""
        for part in module.modules():
            for key, hook in list(part._forward_pre_hooks.items()):
                if isinstance(hook, prune.BasePruningMethod):
                    hook.remove(part)
                    del part._forward_pre_hooks[key]

    def _run_pruning(self, trainer: Trainer) -> None:
        epoch, accelerator = trainer.current_epoch, trainer.accelerator
        amount = _at(self.amount, epoch)
        if not _at(self._apply_pruning, epoch) or not amount:
            return
        self.apply_pruning(amount)
        if _at(self._lottery, epoch):
            self.apply_lottery_ticket_hypothesis()
        for part, name in self._parameters_to_prune:  # random masks may differ; use rank 0's
            for tensor in (getattr(part, f"{name}_mask"), getattr(part, f"{name}_orig").data):
                mine = tensor if accelerator.is_main_process else torch.zeros_like(tensor)
                tensor.copy_(accelerator.reduce(mine))

    def apply_pruning(self, amount: int | float) -> None:
        """Prune this number or fraction of the remaining values."""
        parameters, kwargs = self._parameters_to_prune, {**self._kwargs, "amount": amount}
        if self._global:
            prune.global_unstructured(parameters, pruning_method=self._method, **kwargs)
        else:
            for part, name in parameters:
                self._method.apply(part, name, **kwargs)
        if self._verbose:
            masks = [getattr(part, f"{name}_mask") for part, name in parameters]
            zeros = [int((mask == 0).sum()) for mask in masks]
            total = sum(mask.numel() for mask in masks)
            logger.info("Pruned %d of %d parameters.", sum(zeros), total)
            for (part, name), mask, pruned in zip(parameters, masks, zeros, strict=True):
                if self._verbose > 1:
                    logger.info("Pruned %d of %d in %s of %s.", pruned, mask.numel(), name, part)

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Reset the parameters to their initial values, or draw new ones; the masks stay."""
        sources = self._originals
        if self._resample_parameters:
            sources = copy.deepcopy(sources)
            for source in sources.values():
                if hasattr(source, "reset_parameters"):
                    source.reset_parameters()
        for part, name in self._parameters_to_prune:
            getattr(part, f"{name}_orig").data.copy_(getattr(sources[id(part)], name).data)


def _at(value: Any, epoch: int) -> Any:
    return value(epoch) if callable(value) else value
