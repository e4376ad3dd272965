"""What users subclass: the model, its steps, its optimizers, and hooks into the loop."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer import checkpoint as disk
from trainer.distributed.collectives import gather
from trainer.errors import CheckpointError, choose
from trainer.hparams import HyperParameters, keep, kept_by, make
from trainer.metrics import Kind
from trainer.optim.optimizer import parameters_of
from trainer.ported.arguments import log_arguments
from trainer.ported.attributes import NO_LOGGER, Refused, TypeOfParameters
from trainer.tree import count_samples, map_tree, to_device

if TYPE_CHECKING:
    from trainer.trainer import Trainer

M = TypeVar("M", bound="TrainModule")

_TRAINER = "trainer"  # the stem of what a checkpoint of a run holds beside its weights


class TrainModule(nn.Module):
    """A model that knows how it is trained.

    An ``nn.Module`` with the hook names of a LightningModule. `training_step` and
    `configure_optimizers` are enough for `Trainer.fit`; whatever else is overridden is called where
    `callbacks.Callback` shows it in the loop.

    Attributes:
        automatic_optimization: False leaves backward and optimizer steps to `training_step`, which
            then uses `optimizers`, `manual_backward` and `clip_gradients`.
    """

    automatic_optimization: bool = True

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Trainer | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy made in a run, an average's or a pickled one for a worker, is not in the run.
        kept: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]  # torch's
        return {**kept, "_trainer": None}

    # -- what it was made of -------------------------------------------------------------------

    def save_hyperparameters(
        self,
        *names: str | Mapping[str, Any] | Namespace,
        ignore: str | Iterable[str] | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments of ``__init__`` in `hparams`; call it there.

        Checkpoints hold them, so that `load_from_checkpoint` can make the module again, and
        trackers are told. Called by a base class it keeps the arguments of the subclass too. Values
        are those that the names have at the call, copied.

        They must be plain data: numbers, texts, None, bytes, dtypes, devices, and lists, tuples,
        sets and dicts of these, nested at will. Paths are kept as text, members of enumerations
        that are numbers or texts as these, numpy's numbers as Python's, other mappings as dicts
        and other kinds of lists as lists.

        Args:
            *names: The arguments to keep, or one dict or ``argparse.Namespace`` of values;
                all arguments unless given. Where ``__init__`` took that dict as one argument,
                `load_from_checkpoint` passes it as such.
            ignore: Arguments to leave out, such as a module that was passed in. Names that there
                are no arguments of are all right: a base class may name those of subclasses.
            logger: Trackers are told.

        Raises:
            TypeError: A value is not plain data, or was passed by position in ``*args``.
            ValueError: There is no argument of that name.
            RuntimeError: Called outside ``__init__`` without values.
        """
        keep(self, names, sys._getframe(1), ignore=ignore, private=not logger)

    @property
    def hparams(self) -> HyperParameters:
        """What `save_hyperparameters` kept: a dict whose items are attributes too.

        A checkpoint holds the values as they are when it is saved.
        """
        return kept_by(self).values

    @classmethod
    def load_from_checkpoint(
        cls: type[M],
        path: str | os.PathLike[str],
        *,
        map_location: str | torch.device | None = None,
        strict: bool = True,
        **kwargs: Any,
    ) -> M:
        """Make a module as a checkpoint holds it, without a Trainer.

        The checkpoint is verified. The class is called with the arguments that were saved
        (`save_hyperparameters`), then come `configure_model`, the weights, and, where a run saved
        it, `on_load_checkpoint`. The module is as ``__init__`` leaves it, in training mode: call
        ``eval()`` before you use it to predict.

        Args:
            path: The checkpoint's folder, whole or with the weights only.
            map_location: The device that the module is put on; it stays where ``__init__`` made it
                unless given.
            strict: All names of weights must fit. False loads those that do and lists the others in
                the log; shapes must fit in any case.
            **kwargs: Arguments for the class; they take the place of saved ones.

        Raises:
            CheckpointError: There is no sound checkpoint at `path`, the class does not take the
                arguments that were saved, or the weights do not fit the module.
            TypeError: An argument is neither saved nor given, the class does not take one that was
                given, or `map_location` is no device.
            ValueError: There is no such device as `map_location`.
        """
        device = None if map_location is None else _device(map_location)
        folder = _checkpoint_at(path)
        manifest = disk.verify(folder)
        module = make(cls, manifest.get("hyper_parameters", {}), kwargs, folder)
        module.configure_model()
        module.to(device)
        weights = disk.load_weights(folder)
        disk.load_into(module, weights, where=folder / disk.WEIGHTS_NAME, strict=strict)
        if f"{_TRAINER}.json" in manifest["files"]:
            module.on_load_checkpoint(disk.load_tree(folder, _TRAINER)["extra"])
        return module

    # -- the run -------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The Trainer of the run at hand.

        Raises:
            RuntimeError: There is none.
        """
        trainer: Trainer | None = self.__dict__.get("_trainer")
        if trainer is None:
            raise RuntimeError(
                f"{type(self).__name__} has no trainer: it is there only while fit, validate, "
                "test or predict run. (Did __init__ call super().__init__()?)"
            )
        return trainer

    @property
    def device(self) -> torch.device:
        """Where the parameters are; the CPU for a module without any."""
        tensor = next(chain(self.parameters(), self.buffers()), None)
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def global_step(self) -> int:
        """Updates made so far; 0 outside a run."""
        trainer = self.__dict__.get("_trainer")
        return 0 if trainer is None else trainer.global_step

    @property
    def current_epoch(self) -> int:
        """The epoch at hand, from 0; 0 outside a run."""
        trainer = self.__dict__.get("_trainer")
        return 0 if trainer is None else trainer.current_epoch

    @property
    def global_rank(self) -> int:
        """This process among all; 0 outside a run."""
        trainer = self.__dict__.get("_trainer")
        return 0 if trainer is None else trainer.global_rank

    @property
    def local_rank(self) -> int:
        """This process among those of its machine; 0 outside a run."""
        trainer = self.__dict__.get("_trainer")
        return 0 if trainer is None else trainer.local_rank

    logger = Refused(NO_LOGGER)
    loggers = Refused(NO_LOGGER)
    dtype = TypeOfParameters()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print``, once a machine."""
        trainer = self.__dict__.get("_trainer")
        (print if trainer is None else trainer.accelerator.print)(*args, **kwargs)

    def all_gather(self, data: Any, group: None = None, sync_grads: bool = False) -> Any:
        """The tensors of all processes, stacked; every process calls it.

        Args:
            data: Tensors and numbers in nested containers; of the same shapes on every process.
            group: All processes take part; None is the only choice.
            sync_grads: The result has no graph; False is the only choice.

        Returns:
            The same containers with a first dimension of ``num_processes``; the input itself with
            one process.

        Raises:
            ValueError: `group` or `sync_grads` is given.
        """
        if group is not None or sync_grads:
            raise ValueError(
                f"all_gather was called with group={group!r}, sync_grads={sync_grads!r}; it "
                "gathers over all processes and without a graph. torch.distributed.nn.functional."
                "all_gather does the rest."
            )
        if self.trainer.world_size == 1:
            return data
        return gather(
            map_tree(lambda leaf: torch.as_tensor(leaf, device=self.device).unsqueeze(0), data)
        )

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce: Kind = "mean",
        batch_size: float | None = None,
        logger: bool | None = None,
        add_dataloader_idx: bool = True,
        **ported: Any,
    ) -> None:
        """Record a value: a number, a tensor of one element, or a metric object.

        Nothing is read from the device here. A step's value is the mean over its window of
        micro-batches; an epoch's is the mean over all items of all processes. A metric object
        (``update``, ``compute``, ``reset``) is computed at the end of the epoch and reset; on the
        step its value is what its call returned, of others what they compute by then.

        Args:
            name: The metric's name, such as ``"train/loss"``. With both `on_step` and `on_epoch`
                there are two, ``name_step`` and ``name_epoch``.
            value: Detached here.
            prog_bar: Show it in the progress bar.
            on_step: Record the value of this update, if it is due; the default in `training_step`.
            on_epoch: Accumulate until the epoch ends; the default elsewhere.
            reduce: How values become one: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.
            batch_size: The weight in a mean; unless given the batch's `count_items`, in the hooks
                around an update that of its window.
            logger: False keeps it from the trackers; ``metrics.jsonl`` and callbacks have it.
            add_dataloader_idx: Of several loaders, each one's values have its number in their name.
                With False the name is as given; no two loaders may then use the same one.
            **ported: Further arguments of a LightningModule's ``log``. ``sync_dist`` says what is
                always done, ``reduce_fx`` is `reduce`, ``metric_attribute`` is not needed;
                ``rank_zero_only=True`` and ``enable_graph=True`` are refused.

        Raises:
            RuntimeError: No run is at hand, or the place has nothing to record to (`MetricError`).
            ValueError: The value has several elements, the reduction is unknown or differs from an
                earlier call's, or an argument asks for what is not done.
            TypeError: The value is not a number, or there is no such argument.
        """
        if ported:
            reduce = log_arguments(name, ported).get("reduce", reduce)
        metrics = self.trainer.metrics
        if logger is False or not add_dataloader_idx:
            told = logger is not False
            with metrics.renamed(name, logger=told, add_dataloader_idx=add_dataloader_idx):
                self.log(
                    name,
                    value,
                    prog_bar,
                    on_step=on_step,
                    on_epoch=on_epoch,
                    reduce=reduce,
                    batch_size=batch_size,
                )
            return
        metrics.log(
            name,
            value,
            on_step=on_step,
            on_epoch=on_epoch,
            prog_bar=prog_bar,
            reduce=reduce,
            batch_size=batch_size,
        )

    def log_dict(
        self, dictionary: Mapping[str, Any], prog_bar: bool = False, **kwargs: Any
    ) -> None:
        """`log` each of them, with the same further arguments.

        Raises:
            TypeError: It is no dict; see `log` for the rest.
        """
        if not hasattr(dictionary, "items"):
            raise TypeError(
                f"log_dict was given {dictionary!r} of type {type(dictionary).__name__}; it must "
                "be a dict of names and values, or a MetricCollection."
            )
        for name, value in dictionary.items():
            self.log(name, value, prog_bar, **kwargs)

    # -- to define -----------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Compute the loss of one micro-batch, as a mean over its items.

        Returns:
            The loss, a tensor of one element with a graph, or a dict with it under ``"loss"``.
        """
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one batch; with several loaders a third argument is ``dataloader_idx``."""
        raise NotImplementedError

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one batch; with several loaders a third argument is ``dataloader_idx``."""
        raise NotImplementedError

    def predict_step(
        self,
        batch: Any,
        batch_idx: int,  # noqa: ARG002 - an interface
        dataloader_idx: int = 0,  # noqa: ARG002 - an interface
    ) -> Any:
        """The prediction for one batch; the module called on it unless overridden."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """The optimizers and their schedules, made after the model was prepared.

        Returns:
            An optimizer; a pair of optimizer and scheduler; a dict with ``"optimizer"`` and
            optionally ``"scheduler"``, ``"interval"`` (``"step"`` or ``"epoch"``),
            ``"frequency"`` and ``"monitor"``; or a list of optimizers, pairs or dicts. A dict may
            also have ``"max_grad_norm"`` and ``"max_grad_value"``, by which the gradients of this
            optimizer are clipped in place of the Trainer's, and a ``"name"`` for records and
            checkpoints. Several optimizers have parameters of their own and step together.
        """
        raise NotImplementedError

    def configure_model(self) -> None:
        """Make large parts of the model here: after ``setup``, before anything is prepared."""

    def count_items(self, batch: Any) -> float | Tensor:
        """What the loss of a batch is a mean over: the batch size, unless overridden.

        Unless overridden it is not called: the loader's sampler knows the number of samples. Only
        what a ``collate_fn`` of your own made is looked at, for samples that it left out.

        A language model returns the number of tokens that count. Micro-batches and processes are
        weighted by it.
        """
        samples = count_samples(batch)
        return 1 if samples is None else samples

    def transfer_batch_to_device(
        self,
        batch: Any,
        device: torch.device,
        dataloader_idx: int,  # noqa: ARG002 - an interface
    ) -> Any:
        """Copy a batch to the device; override it for types that have no ``.to``.

        Where this and the other two batch hooks are left alone, the copy runs beside the kernels of
        the step before; an override is called in the stream of those.
        """
        return to_device(batch, device, non_blocking=True)

    def on_before_batch_transfer(
        self,
        batch: Any,
        dataloader_idx: int,  # noqa: ARG002 - an interface
    ) -> Any:
        """Change a batch before it goes to the device, one batch ahead of its use; return it.

        What is drawn here and in `on_after_batch_transfer` depends on the seed, the epoch and the
        batch's number alone, not on where a run was resumed.
        """
        return batch

    def on_after_batch_transfer(
        self,
        batch: Any,
        dataloader_idx: int,  # noqa: ARG002 - an interface
    ) -> Any:
        """Change a batch on the device, to augment it there, say; return it."""
        return batch

    def prepare_data(self) -> None:
        """Download and prepare; the first process of each machine runs it before the others."""

    def setup(self, stage: str) -> None:
        """Before the model is prepared; `stage` is fit, validate, test or predict."""

    def teardown(self, stage: str) -> None:
        """After everything, also after an error."""

    def train_dataloader(self) -> Any:
        """The training loader, where `fit` was given none."""

    def val_dataloader(self) -> Any:
        """The validation loader or a list of them, where none was given."""

    def test_dataloader(self) -> Any:
        """The test loader or a list of them, where none was given."""

    def predict_dataloader(self) -> Any:
        """The prediction loader or a list of them, where none was given."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add tensors and plain values to what is saved."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take back what `on_save_checkpoint` added."""

    # -- manual optimisation -------------------------------------------------------------------

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The prepared optimizers: one, or a list of several.

        Args:
            use_pl_optimizer: The prepared ones; True is the only choice.

        Raises:
            ValueError: It is False: updates of the bare optimizers would be neither counted nor
                averaged over the processes.
        """
        if not use_pl_optimizer:
            raise ValueError(
                "optimizers(use_pl_optimizer=False) asks for the bare optimizers, whose updates "
                "would be neither counted nor averaged over the processes; leave it out."
            )
        prepared = self.trainer.optimizers
        return prepared[0] if len(prepared) == 1 else list(prepared)

    def lr_schedulers(self) -> Any:
        """The schedulers: None, one, or a list of several."""
        schedulers = [entry.scheduler for entry in self.trainer.schedulers]
        if len(schedulers) > 1:
            return schedulers
        return schedulers[0] if schedulers else None

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward, with the run's precision; in place of ``loss.backward()``.

        Args:
            loss: With a graph.
            *args: For ``loss.backward``.
            **kwargs: For ``loss.backward``, such as ``retain_graph=True``.
        """
        self.trainer.manual_backward(loss, *args, **kwargs)

    def toggle_optimizer(self, optimizer: Optimizer) -> None:
        """Until `untoggle_optimizer`, let only this optimizer's parameters require gradients.

        So a backward pass leaves the parameters of the other optimizers alone.

        Raises:
            RuntimeError: Another optimizer is toggled.
        """
        if "_toggled" in self.__dict__:
            raise RuntimeError(
                "toggle_optimizer was called twice without untoggle_optimizer between, which "
                "would forget what required gradients before."
            )
        own = set(parameters_of([optimizer]))
        others = [p for p in parameters_of(self.trainer.optimizers) if p not in own]
        self.__dict__["_toggled"] = [p for p in others if p.requires_grad]
        for parameter in others:
            parameter.requires_grad_(False)

    def untoggle_optimizer(self, optimizer: Optimizer) -> None:  # noqa: ARG002 - as in Lightning
        """Let require gradients what did before `toggle_optimizer`."""
        for parameter in self.__dict__.pop("_toggled", ()):
            parameter.requires_grad_(True)

    def freeze(self: M) -> M:
        """Let no parameter require gradients, in evaluation mode; returns the module."""
        return self.requires_grad_(False).eval()

    def unfreeze(self: M) -> M:
        """Let every parameter require gradients, in training mode; returns the module."""
        return self.requires_grad_(True).train()

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        *,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
    ) -> Tensor | None:
        """Clip one optimizer's gradients before it steps, over all processes alike.

        Args:
            optimizer: A prepared one.
            gradient_clip_val: Lightning's name for either limit.
            gradient_clip_algorithm: Which one it is, ``"norm"`` (also if None) or ``"value"``.
            max_grad_norm: Clip the norm of its gradients.
            max_grad_value: Clip each element of them.

        Returns:
            The norm before clipping; None without a limit of the norm.

        Raises:
            ValueError: The algorithm is unknown, or a limit is given twice or out of range.
        """
        if gradient_clip_algorithm not in (None, "norm", "value"):
            raise ValueError(
                choose("gradient_clip_algorithm", gradient_clip_algorithm, ("norm", "value"))
            )
        if gradient_clip_val is not None:
            if max_grad_norm is not None or max_grad_value is not None:
                raise ValueError(
                    f"clip_gradients was given gradient_clip_val={gradient_clip_val!r} beside "
                    "max_grad_norm or max_grad_value, which mean the same; give one of them."
                )
            if gradient_clip_algorithm == "value":
                max_grad_value = gradient_clip_val
            else:
                max_grad_norm = gradient_clip_val
        return self.trainer.clip_gradients(
            optimizer, max_grad_norm=max_grad_norm, max_grad_value=max_grad_value
        )

    # -- hooks ---------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """After a checkpoint was loaded, before the sanity check."""

    def on_fit_end(self) -> None:
        """After training, before ``teardown``."""

    def on_train_start(self) -> None:
        """Before the first epoch."""

    def on_train_end(self) -> None:
        """After the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Before an epoch's first window, or that of its rest after a resume; see `Callback`."""

    def on_train_epoch_end(self) -> None:
        """After an epoch's last window; what is logged here belongs to the epoch."""

    def on_train_step_start(self) -> None:
        """Before a window: an update begins."""

    def on_train_step_end(self) -> None:
        """After a window: the update was made, its gradients are still there."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before `training_step`."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a micro-batch; the last of a window sees its update made.

        `outputs` is what `training_step` returned, detached.
        """

    def on_before_backward(self, loss: Tensor) -> None:
        """Before the backward pass of a micro-batch."""

    def on_after_backward(self) -> None:
        """After the backward pass of a micro-batch."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Before an update; the gradients are unscaled, reduced, and not yet clipped."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Before the gradients are dropped."""

    def on_validation_start(self) -> None:
        """Before a validation; the module is in evaluation mode."""

    def on_validation_end(self) -> None:
        """After a validation."""

    def on_validation_epoch_start(self) -> None:
        """Before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """After the last validation batch; what is logged here belongs to the validation."""

    def on_validation_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before `validation_step`."""

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After `validation_step`."""

    def on_test_start(self) -> None:
        """Before a test."""

    def on_test_end(self) -> None:
        """After a test."""

    def on_test_epoch_start(self) -> None:
        """Before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """After the last test batch; what is logged here belongs to the test."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before `test_step`."""

    def on_test_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After `test_step`."""

    def on_predict_start(self) -> None:
        """Before predictions."""

    def on_predict_end(self) -> None:
        """After predictions."""

    def on_predict_epoch_start(self) -> None:
        """Before the first batch to predict."""

    def on_predict_epoch_end(self) -> None:
        """After the last batch to predict."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before `predict_step`."""

    def on_predict_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After `predict_step`."""


def _device(map_location: str | torch.device) -> torch.device:
    if not isinstance(map_location, (str, torch.device)):
        raise TypeError(
            f"map_location is {map_location!r}; it must be a device, such as 'cpu' or 'cuda:0'."
        )
    try:
        return torch.device(map_location)
    except RuntimeError as error:
        raise ValueError(
            f"map_location is {map_location!r}; it must be a device, such as 'cpu' or 'cuda:0'."
        ) from error


def _checkpoint_at(path: str | os.PathLike[str]) -> Path:
    """The folder of one checkpoint; what else a path may be is an error that says what to give."""
    folder = Path(path).expanduser()
    if folder.is_file():
        hint = f"give the checkpoint's folder, {folder.parent}."
        if folder.suffix not in (".json", ".safetensors"):
            hint = (
                "a checkpoint is a folder. Files such as .ckpt and .pt are pickles, which are "
                "never loaded: take their weights with the library that wrote them, and load "
                "them by module.load_state_dict."
            )
        raise CheckpointError(f"{folder} is a file; {hint}")
    for root in (folder, folder / "checkpoints"):
        if found := disk.committed(root):
            raise CheckpointError(
                f"{folder} is a folder of checkpoints; give one of them, such as the newest, "
                f"{found[-1]}."
            )
    folder = disk.locate(folder)
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint at {folder}: no such folder.")
    return folder
