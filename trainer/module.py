"""`TrainModule`, the base class of users' models: steps, optimizers and hooks."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.loading import load_into
from trainer.checkpoint.parts import Reader
from trainer.checkpoint.storage import committed, locate, verify
from trainer.checkpoint.weights import WEIGHTS_NAME
from trainer.checks import check_choice
from trainer.distributed.collectives import gather
from trainer.errors import CheckpointError
from trainer.files import with_home
from trainer.hints import NO_LOGGER
from trainer.hparams import HyperParameters, keep, kept_by, make
from trainer.metrics import Kind
from trainer.metrics.log_arguments import log_arguments
from trainer.optim.optimizer import parameters_of
from trainer.tree import count_samples, detach, map_tree, to_device

if TYPE_CHECKING:
    from trainer.trainer import Trainer

M = TypeVar("M", bound="TrainModule")

_TRAINER = "trainer"  # the file stem of the run's state in a checkpoint
Weights = tuple[Mapping[str, Any], Mapping[str, Any] | None]
"""The weights of a checkpoint and, if they differ, the trained ones, by name."""


if TYPE_CHECKING:
    _of_the_class = classmethod
else:

    class _of_the_class(classmethod):
        """A class method that raises if called on an instance, which it would not change."""

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            bound = super().__get__(instance, owner)
            if instance is None:
                return bound

            def refuse(*_: Any, **__: Any) -> NoReturn:
                name = f"{owner.__name__}.{bound.__name__}"
                raise TypeError(
                    f"{name} returns a new module, but was called on an instance, which it would "
                    f"not change. Call it on the class: module = {name}(path)."
                )

            return refuse


class NoLogger:
    """Replaces the loggers of a LightningModule; any use raises an error."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"A module's logger has no {name!r}: {NO_LOGGER}.")

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"A module has no loggers: {NO_LOGGER}.")


class TypeOfParameters:
    """The `dtype` of a module: that of its first non-integer parameter or buffer.

    Without one, it is torch's default dtype. A module may set the attribute to another value.
    """

    def __get__(self, instance: nn.Module | None, owner: type) -> Any:
        if instance is None:
            return self
        dtypes = (tensor.dtype for tensor in chain(instance.parameters(), instance.buffers()))
        others = (dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
        return next(others, torch.get_default_dtype())


class TrainModule(nn.Module):
    """A model that defines how it is trained.

    An ``nn.Module`` with the hook names of a LightningModule. `Trainer.fit` requires only
    `training_step` and `configure_optimizers`. The docstring of `callbacks.Callback` shows the
    loop, and where each hook is called.

    Example::

        class Classifier(TrainModule):
            def __init__(self):
                super().__init__()
                self.net = torch.nn.Linear(64, 10)

            def training_step(self, batch, batch_idx):
                inputs, targets = batch
                loss = torch.nn.functional.cross_entropy(self.net(inputs), targets)
                self.log("train/loss", loss)
                return loss

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-3)

        Trainer(max_epochs=10).fit(Classifier(), train_loader)

    Attributes:
        automatic_optimization: False means manual optimisation: `training_step` runs backward and
            steps the optimizers, with `optimizers`, `manual_backward` and `clip_gradients`.
        strict_loading: False loads only the weights of a checkpoint whose names and shapes match,
            and logs the others. It applies to `load_from_checkpoint`, to evaluations, and to a fit
            that starts from a weights-only checkpoint. A run that resumes always needs all weights.
    """

    automatic_optimization: bool = True
    strict_loading: bool = True

    _needs_trainer: ClassVar[frozenset[str]] = frozenset({"trainer"})  # raise outside a run

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Trainer | None = None

    def __dir__(self) -> list[str]:
        # torch.jit.trace and inspect.getmembers read every attribute that is listed.
        names: list[str] = super().__dir__()  # type: ignore[no-untyped-call]  # torch's
        in_run = self.__dict__.get("_trainer") is not None
        return names if in_run else [name for name in names if name not in self._needs_trainer]

    def __getstate__(self) -> dict[str, Any]:
        # A copy made during a run (for weight averaging, or pickled for a worker) has no trainer.
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]  # torch's
        # Methods compiled for the run cannot be pickled, and are bound to this module.
        compiled, before = state.pop("_compiled_for_run", ((), {}))
        attributes = {name: value for name, value in state.items() if name not in compiled}
        return {**attributes, **before, "_trainer": None}

    # -- hyper-parameters ----------------------------------------------------------------------

    def save_hyperparameters(
        self,
        *names: str | Mapping[str, Any] | Namespace,
        ignore: str | Iterable[str] | None = None,
        logger: bool = True,
    ) -> None:
        """Record the arguments of ``__init__`` in `hparams`; call it inside ``__init__``.

        Checkpoints store them, so that `load_from_checkpoint` can recreate the module, and trackers
        log them. If a base class calls it, the arguments of the subclass are recorded too. The
        values are copies of the local variables at the time of the call.

        The values must be plain data: numbers, strings, None, bytes, dtypes, devices, and lists,
        tuples, sets and dicts of these, nested to any depth. Some types are converted: paths to
        strings, enumeration members to their number or string, numpy numbers to Python numbers,
        other mappings to dicts, and other kinds of lists to lists.

        Args:
            *names: The names of the arguments to record, or one dict or ``argparse.Namespace`` of
                values; by default all arguments. If that dict was an argument of ``__init__``,
                `load_from_checkpoint` passes it as that argument.
            ignore: Arguments to leave out, such as a module that was passed in. Unknown names are
                allowed: a base class may name arguments of its subclasses.
            logger: Log them to trackers.

        Raises:
            TypeError: A value is not plain data, or was passed by position in ``*args``.
            ValueError: There is no argument of that name.
            RuntimeError: Called outside ``__init__`` without values.
        """
        keep(self, names, sys._getframe(1), ignore=ignore, private=not logger)

    @property
    def hparams(self) -> HyperParameters:
        """The hyper-parameters from `save_hyperparameters`: a dict whose items are also attributes.

        A checkpoint stores the values at the time of the save.
        """
        return kept_by(self).values

    @_of_the_class
    def load_from_checkpoint(
        cls: type[M],
        path: str | os.PathLike[str] | None = None,
        *,
        map_location: str | torch.device | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> M:
        """Create a module from a checkpoint, without a Trainer.

        The checkpoint is verified, and the class is called with the saved arguments
        (`save_hyperparameters`). Then `configure_model` is called, `on_load_checkpoint` too if a
        run saved the checkpoint, and the weights are loaded. The module is in training mode, as
        after ``__init__``; call ``eval()`` before using it for predictions.

        Args:
            path: The checkpoint's folder, full or weights only; ``checkpoint_path=`` is the same.
            map_location: The device to move the module to; by default it stays where ``__init__``
                created it.
            strict: Require all weights to match by name and shape, and the class to take all saved
                arguments (unless these and `kwargs` cover all of its arguments). False loads what
                matches and logs the others. None takes `strict_loading`.
            **kwargs: Arguments for the class; they override saved ones.

        Raises:
            CheckpointError: There is no intact checkpoint at `path`, the class does not take the
                saved arguments, or the weights do not match the module.
            TypeError: An argument is neither saved nor passed, or the class does not take a passed
                argument.
        """
        device = None if map_location is None else torch.device(map_location)
        if path is None:  # otherwise it is an argument of the class
            path = kwargs.pop("checkpoint_path", None)
        folder = _checkpoint_at(path)
        reader = Reader(folder, verify(folder))
        manifest = reader.manifest
        of_class = cls.strict_loading if strict is None else strict
        module = make(cls, manifest.get("hyper_parameters", {}), kwargs, folder, strict=of_class)
        strict = module.strict_loading if strict is None else strict
        module.configure_model()
        weights = reader.weights(WEIGHTS_NAME)
        if f"{_TRAINER}.json" in manifest["files"]:  # before the weights: it may replace submodules
            _, weights = module._call_on_load_checkpoint(reader.tree(_TRAINER)["extra"], weights)
        module.to(device)
        load_into(module, weights, where=folder / WEIGHTS_NAME, strict=strict)
        return module

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse ``torch.jit.script``, which calls this.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "Use torch.export.export(module, …) or torch.jit.trace(module, …): torch.jit.script "
            f"compiles no TrainModule such as {type(self).__name__}, only the modules inside it."
        )

    # -- state of the run ----------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The Trainer of the current run.

        Raises:
            RuntimeError: The module is not in a run.
        """
        trainer: Trainer | None = self.__dict__.get("_trainer")
        if trainer is None:
            raise RuntimeError(
                f"{type(self).__name__} has no trainer: a module has a trainer only while fit, "
                "validate, test or predict run, and a submodule only if it was created in "
                "__init__, setup or configure_model. (Did __init__ call super().__init__()?)"
            )
        return trainer

    @property
    def device(self) -> torch.device:
        """The device of the parameters; the CPU for a module without parameters."""
        tensor = next(chain(self.parameters(), self.buffers()), None)
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def global_step(self) -> int:
        """The number of optimizer steps so far; 0 outside a run."""
        trainer = self.__dict__.get("_trainer")
        return 0 if trainer is None else trainer.global_step

    @property
    def current_epoch(self) -> int:
        """The current epoch, counted from 0; 0 outside a run."""
        trainer = self.__dict__.get("_trainer")
        return 0 if trainer is None else trainer.current_epoch

    @property
    def global_rank(self) -> int:
        """The global rank of this process; 0 outside a run."""
        trainer = self.__dict__.get("_trainer")
        return 0 if trainer is None else trainer.global_rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine; 0 outside a run."""
        trainer = self.__dict__.get("_trainer")
        return 0 if trainer is None else trainer.local_rank

    logger: Any = NoLogger()
    loggers: Any = NoLogger()
    dtype = TypeOfParameters()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print``, on the local main process of each machine only."""
        trainer = self.__dict__.get("_trainer")
        (print if trainer is None else trainer.accelerator.print)(*args, **kwargs)

    def all_gather(self, data: Any, group: None = None, sync_grads: bool = False) -> Any:
        """Gather and stack the tensors of all processes; collective.

        Every process must call it, as in a step. At the end of the data some ranks may have no
        batch: they call no batch hooks, and their step runs a dummy batch, whose values are in the
        result. To avoid dummy batches, set `limit_train_batches` to a multiple of the number of
        processes.

        Args:
            data: Tensors and numbers in nested containers, of the same shapes on every process.
            group: Must be None: all processes take part.
            sync_grads: Must be False: the result has no graph.

        Returns:
            The same containers, each tensor of shape ``(num_processes, ...)``; with one process,
            the input itself.

        Raises:
            ValueError: `group` or `sync_grads` is given.
            DistributedOperationException: Other processes do not call it, or have other shapes.
        """
        if group is not None or sync_grads:
            raise ValueError(
                f"all_gather was called with group={group!r}, sync_grads={sync_grads!r}; it only "
                "gathers over all processes and without a graph. Use torch.distributed.nn."
                "functional.all_gather for the rest."
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
        **others: Any,
    ) -> None:
        """Log a value: a number, a tensor of one element, or a metric object.

        The call does not synchronise with the device. The value of a step is the mean over its
        gradient accumulation window. The value of an epoch is the mean over all items of all
        processes. A metric object (``update``, ``compute``, ``reset``) is computed and reset at the
        end of the epoch. Its step value is the result of calling it for the batch or, if it was not
        called, its value so far.

        Args:
            name: The metric's name, such as ``"train/loss"``. With both `on_step` and `on_epoch`
                there are two metrics, ``name_step`` and ``name_epoch``.
            value: The value; it is detached.
            prog_bar: Show it in the progress bar.
            on_step: Log the value of this update, if the update is one of `Trainer.log_every`; the
                default in `training_step`.
            on_epoch: Accumulate until the epoch ends; the default everywhere else.
            reduce: The reduction of several values: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.
            batch_size: The weight of the value in a mean. The default is `count_items` of the batch
                or, in the hooks around an update, of the whole accumulation window.
            logger: False does not send it to trackers; ``metrics.jsonl`` and callbacks still
                receive it.
            add_dataloader_idx: With several loaders, append the loader's number to the name. With
                False, loaders must log different names.
            **others: Further arguments of a LightningModule's ``log``. ``sync_dist`` has no effect
                (values are always reduced), ``reduce_fx`` is `reduce`, ``metric_attribute`` is not
                needed; ``rank_zero_only=True`` and ``enable_graph=True`` raise an error.

        Raises:
            RuntimeError: There is no run, or this hook cannot log (`MetricError`).
            ValueError: The value has several elements, the reduction is unknown or differs from an
                earlier call's, or an argument has an unsupported value.
            TypeError: The value is not a number, or an argument is unknown.
        """
        if others:
            reduce = log_arguments(name, others).get("reduce", reduce)
        metrics = self.trainer.metrics
        if logger is False or not add_dataloader_idx:
            is_logged = logger is not False
            with metrics.renamed(name, logger=is_logged, add_dataloader_idx=add_dataloader_idx):
                TrainModule.log(
                    self,
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
        """Call `log` for each item, with the same further arguments."""
        for name, value in dictionary.items():
            self.log(name, value, prog_bar, **kwargs)

    # -- methods to override -------------------------------------------------------------------

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
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> Any:
        """Return the prediction for one batch; by default the module's output for it."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Create the optimizers and their schedulers; called after the model was prepared.

        Returns:
            An optimizer; a pair of optimizer and scheduler; a dict with ``"optimizer"`` and
            optionally ``"scheduler"``, ``"interval"`` (``"step"`` or ``"epoch"``),
            ``"frequency"`` and ``"monitor"``; or a list of optimizers, pairs or dicts. A dict may
            also have ``"max_grad_norm"`` and ``"max_grad_value"``, which replace the Trainer's
            limits for this optimizer's gradients, and a ``"name"`` for records and checkpoints.
            Several optimizers must not share parameters; all of them step at every update.
        """
        raise NotImplementedError

    def configure_model(self) -> None:
        """Create large submodules; called after ``setup``, before the model is prepared."""

    def count_items(self, batch: Any) -> float | Tensor:
        """Return the number of items over which a batch's loss is a mean; by default its samples.

        Losses of micro-batches and processes are weighted by it. A language model should return the
        number of tokens in the loss.

        If it is not overridden, it is not called, since the loader's sampler knows the number of
        samples. Only batches of a custom ``collate_fn`` are inspected, because it may have dropped
        samples.
        """
        samples = count_samples(batch)
        return 1 if samples is None else samples

    def transfer_batch_to_device(
        self,
        batch: Any,
        device: torch.device,
        dataloader_idx: int,
    ) -> Any:
        """Copy a batch to the device; override it for types that have no ``.to``.

        If none of the three batch transfer hooks is overridden, the copy overlaps with the kernels
        of the previous step. An override is called in the stream of these kernels, so it does not
        overlap.
        """
        return to_device(batch, device, non_blocking=True)

    def on_before_batch_transfer(
        self,
        batch: Any,
        dataloader_idx: int,
    ) -> Any:
        """Change a batch on the host and return it; called one batch ahead of its use (prefetch).

        Random numbers drawn here and in `on_after_batch_transfer` depend only on the seed, the
        epoch and the batch index, so a resumed run draws the same numbers.
        """
        return batch

    def on_after_batch_transfer(
        self,
        batch: Any,
        dataloader_idx: int,
    ) -> Any:
        """Change a batch on the device, for example to augment it; return it."""
        return batch

    def prepare_data(self) -> None:
        """Download and prepare data; local rank 0 of each machine runs it before the others."""

    def setup(self, stage: str) -> None:
        """Called before the model is prepared; `stage` is fit, validate, test or predict."""

    def teardown(self, stage: str) -> None:
        """Called at the end of a run, even after an error."""

    def train_dataloader(self) -> Any:
        """Return the training loader; called if none was passed to `fit`."""

    def val_dataloader(self) -> Any:
        """Return the validation loader or a list of them; called if none was passed."""

    def test_dataloader(self) -> Any:
        """Return the test loader or a list of them; called if none was passed."""

    def predict_dataloader(self) -> Any:
        """Return the prediction loader or a list of them; called if none was passed."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add tensors and plain values to the dict that is saved in a checkpoint."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what `on_save_checkpoint` added; called before the weights are loaded."""

    # A base class may override these three, so that checkpoint hooks can change the weights.

    def _call_on_save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        hooks: Callable[[dict[str, Any]], None],
        weights: Callable[[], Weights],
        *,
        weights_only: bool,
    ) -> tuple[dict[str, Any], Weights | None]:
        """Call the ``on_save_checkpoint`` hooks of the callbacks and of the module.

        Args:
            checkpoint: The dict passed to the hooks.
            hooks: Calls the hooks; with `weights_only` only the module's.
            weights: Returns the weights that will be saved and, if they differ, the trained ones.
            weights_only: Whether only weights are saved.

        Returns:
            The part of `checkpoint` to save, and weights to save instead of `weights`, if any.
        """
        if weights_only:
            return {}, None
        hooks(checkpoint)
        return checkpoint, None

    def _call_on_load_checkpoint(
        self, saved: Mapping[str, Any], weights: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Call `on_load_checkpoint`; return the dict passed to it, and the weights to load.

        Args:
            saved: The values added by the ``on_save_checkpoint`` hooks.
            weights: The weights of the checkpoint.
        """
        checkpoint = dict(saved)
        self.on_load_checkpoint(checkpoint)
        return checkpoint, weights

    @property
    def _resumes_strictly(self) -> bool:
        """Whether a run that resumes needs all weights."""
        return True

    # -- manual optimisation -------------------------------------------------------------------

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the prepared optimizers: one, or a list of several.

        Args:
            use_pl_optimizer: Must be True.

        Raises:
            ValueError: `use_pl_optimizer` is False. Steps of the bare optimizers would not be
                counted, and their gradients not all-reduced.
        """
        if not use_pl_optimizer:
            raise ValueError(
                "optimizers(use_pl_optimizer=False) returns the bare optimizers, whose updates "
                "are neither counted nor averaged over the processes; leave it out."
            )
        prepared = self.trainer.optimizers
        return prepared[0] if len(prepared) == 1 else list(prepared)

    def lr_schedulers(self) -> Any:
        """Return the schedulers: None, one, or a list of several."""
        schedulers = [entry.scheduler for entry in self.trainer.schedulers]
        if len(schedulers) > 1:
            return schedulers
        return schedulers[0] if schedulers else None

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward in the run's precision; use it instead of ``loss.backward()``.

        Args:
            loss: A loss with a graph.
            *args: Arguments of ``loss.backward``.
            **kwargs: Arguments of ``loss.backward``, such as ``retain_graph=True``.
        """
        self.trainer.manual_backward(loss, *args, **kwargs)

    def toggle_optimizer(self, optimizer: Optimizer) -> None:
        """Set ``requires_grad`` only for this optimizer's parameters, until `untoggle_optimizer`.

        Backward passes then compute no gradients for the parameters of other optimizers.

        Raises:
            RuntimeError: Another optimizer is toggled.
        """
        if "_toggled" in self.__dict__:
            raise RuntimeError(
                "toggle_optimizer was called twice without untoggle_optimizer in between, so the "
                "original requires_grad flags would be lost. Call untoggle_optimizer first."
            )
        trained = set(parameters_of([optimizer]))
        others = [p for p in parameters_of(self.trainer.optimizers) if p not in trained]
        self.__dict__["_toggled"] = [p for p in others if p.requires_grad]
        for parameter in others:
            parameter.requires_grad_(False)

    # Lightning's steps pass the optimizer.
    def untoggle_optimizer(self, optimizer: Optimizer | None = None) -> None:
        """Restore the ``requires_grad`` flags from before `toggle_optimizer`.

        Args:
            optimizer: Ignored, since only one can be toggled; Lightning requires the argument.
        """
        for parameter in self.__dict__.pop("_toggled", ()):
            parameter.requires_grad_(True)

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer) -> Iterator[None]:
        """`toggle_optimizer` for a ``with`` block."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def freeze(self: M) -> M:
        """Disable gradients of all parameters and set evaluation mode; return the module."""
        return self.requires_grad_(False).eval()

    def unfreeze(self: M) -> M:
        """Enable gradients of all parameters and set training mode; return the module."""
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
        """Clip one optimizer's gradients before it steps, identically on all processes.

        Args:
            optimizer: A prepared optimizer.
            gradient_clip_val: Lightning's name for either limit.
            gradient_clip_algorithm: The limit it sets: ``"norm"`` (also if None) or ``"value"``.
            max_grad_norm: Limit of the gradients' norm.
            max_grad_value: Limit of each gradient element's magnitude.

        Returns:
            The norm before clipping; None without a limit of the norm.

        Raises:
            ValueError: The algorithm is unknown, or a limit is given twice or out of range.
        """
        if gradient_clip_algorithm is not None:
            check_choice("gradient_clip_algorithm", gradient_clip_algorithm, ("norm", "value"))
        if gradient_clip_val is not None:
            if max_grad_norm is not None or max_grad_value is not None:
                raise ValueError(
                    f"clip_gradients got gradient_clip_val={gradient_clip_val!r} together with "
                    "max_grad_norm or max_grad_value, which set the same limit; pass one of them."
                )
            if gradient_clip_algorithm == "value":
                max_grad_value = gradient_clip_val
            else:
                max_grad_norm = gradient_clip_val
        return self.trainer.clip_gradients(
            optimizer, max_grad_norm=max_grad_norm, max_grad_value=max_grad_value
        )

    def _outputs_of_step(
        self,
        outputs: Any,
        micro_batches: int,
    ) -> Any:
        """Return the outputs of `training_step` to pass to `on_train_batch_end`."""
        return detach(outputs)

    # -- the parts of an update, for a module that overrides them ---------------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass; override it to change this.

        The loss is already scaled for the accumulation window and for fp16. `manual_backward` calls
        this hook too.

        Args:
            loss: A tensor of shape ().
            *args: Arguments of ``loss.backward``.
            **kwargs: Arguments of ``loss.backward``.
        """
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step an optimizer in automatic optimisation; an override may skip the update.

        If an override does not step, the update is skipped.

        Args:
            epoch: The current epoch, from 0.
            batch_idx: The number of the batch in the epoch, from 0.
            optimizer: The prepared optimizer.
            optimizer_closure: Returns the loss of the update. Forward and backward have already
                run, so it can be called only once.
        """
        optimizer.step(optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Drop the gradients after an update; see `optimizer_step` for the arguments."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Advance a learning rate scheduler; override it if its ``step`` takes other arguments.

        Args:
            scheduler: The scheduler.
            metric: The value of its ``monitor``; None without a monitor.
        """
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of an optimizer before it steps, in automatic optimisation.

        Without an override, the norm is that of all optimizers' gradients together.

        Args:
            optimizer: The prepared optimizer.
            gradient_clip_val: The limit of the Trainer or of the optimizer; None without one.
            gradient_clip_algorithm: ``"norm"`` or ``"value"``; None without a limit.
        """
        if gradient_clip_val is not None:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

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
        """Before an epoch's first accumulation window; not again if a run resumes inside it.

        See `callbacks.Callback.on_train_epoch_start`, which also lists the effects that a
        checkpoint stores.
        """

    def on_train_epoch_end(self) -> None:
        """After an epoch's last optimizer step; values logged here belong to the epoch."""

    def on_train_step_start(self) -> None:
        """Before a gradient accumulation window, which ends with an optimizer step."""

    def on_train_step_end(self) -> None:
        """After an optimizer step, at the end of its window; the gradients still exist."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before `training_step`.

        Returning -1 skips this rank's batch (weight 0), and ends the epoch on all ranks with this
        update. On several accelerators, if not all ranks return -1, the epoch ends with the next
        update. An update is skipped if all of its batches are.
        """

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a micro-batch; for the last micro-batch of a window, after the optimizer step.

        `outputs` is the detached result of `training_step`.
        """

    def on_before_backward(self, loss: Tensor) -> None:
        """Before the backward pass of a micro-batch."""

    def on_after_backward(self) -> None:
        """After the backward pass of a micro-batch."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Before an optimizer step; gradients are unscaled and all-reduced, but not yet clipped."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Before the gradients are zeroed."""

    def on_validation_start(self) -> None:
        """Before a validation; the module is in evaluation mode."""

    def on_validation_end(self) -> None:
        """After a validation."""

    def on_validation_epoch_start(self) -> None:
        """Before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """After the last validation batch; values logged here belong to the validation."""

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
        """After the last test batch; values logged here belong to the test."""

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


def _checkpoint_at(path: str | os.PathLike[str]) -> Path:
    """Return the folder of one checkpoint, or raise an error that says which path to pass."""
    folder = Path(with_home("path", path))
    if folder.is_file():
        hint = f"give the checkpoint's folder, {folder.parent}."
        if folder.suffix not in (".json", ".safetensors"):
            hint = (
                "a checkpoint is a folder. Files such as .ckpt and .pt are pickles, which are "
                f"never loaded: `trainer migrate {folder}` converts a Lightning checkpoint; for "
                "other files, read the weights with the library that wrote them and load them "
                "with module.load_state_dict."
            )
        raise CheckpointError(f"{folder} is a file; {hint}")
    for root in (folder, folder / "checkpoints"):
        if checkpoints := committed(root):
            raise CheckpointError(
                f"{folder} is a folder of checkpoints; pass one of them, such as the newest, "
                f"{checkpoints[-1]}."
            )
    folder = locate(folder)
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint at {folder}: no such folder.")
    return folder
