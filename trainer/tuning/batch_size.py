"""Search for the largest batch that fits into memory.

Each process tries a size on its own, so that an out-of-memory error leaves no other process waiting
in a collective; then the results are combined. With several processes, buffers of the size of the
gradients are allocated during a trial, because the engine needs them.
"""

# ruff: noqa: ARG001, ARG002 - hooks take all of the loop's arguments, used or not

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from callbacks import Callback
from trainer.checks import check_choice, check_counts, given
from trainer.data.combined import CombinedLoader
from trainer.data.epoch_iterator import EpochIterator
from trainer.data.workers import has_torch_iteration, reading_kwargs
from trainer.distributed.objects import all_gather_object
from trainer.distributed.process_control import exchange
from trainer.errors import module_logger
from trainer.loops.evaluate import TEST, VALIDATION, evaluate
from trainer.loops.predict import predict
from trainer.memory import free_caches, is_out_of_memory
from trainer.module import TrainModule
from trainer.rng import isolated_rng
from trainer.trainer import Trainer
from trainer.tree import find_batch_size
from trainer.tuning.trial import copy_for_trial, isolate, make_trial, owners_of, set_attribute

logger = module_logger(__name__)

METHODS = ("fit", "validate", "test", "predict")
_MODES = ("power", "binsearch")


@dataclass(frozen=True, kw_only=True)
class BatchSizeSearch:
    """The result of a search for a batch size, the same on all processes.

    Attributes:
        batch_size: The number of samples in a micro-batch of one process.
        gradient_accumulation_steps: Micro-batches per update, chosen to keep the requested
            effective batch size, else the Trainer's own number.
        trials: Each size that was tried, in order, and whether it fits on all processes.
    """

    batch_size: int
    gradient_accumulation_steps: int
    trials: dict[int, bool]


@dataclass(frozen=True, kw_only=True)
class SizeSearch:
    """The sizes to try; see `Tuner.scale_batch_size`.

    Raises:
        ValueError: A value is outside its range.
        TypeError: A value has the wrong type.
    """

    mode: str
    steps_per_trial: int
    init_val: int
    max_trials: int
    margin: float
    max_val: int | None

    def __post_init__(self) -> None:
        """Check every value."""
        check_choice("mode", self.mode, _MODES)
        check_counts(
            1,
            steps_per_trial=self.steps_per_trial,
            init_val=self.init_val,
            max_trials=self.max_trials,
            **given(max_val=self.max_val),
        )
        for name in ("steps_per_trial", "init_val", "max_trials", "max_val"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, int(value))  # users often write 1e2
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin is {self.margin}; it must be 0 or more and below 1.")

    def run(self, try_size: Callable[[int], tuple[bool, int | None]]) -> dict[int, bool]:
        """Try sizes until the largest that fits is found; the margin is not subtracted.

        Args:
            try_size: Called with a size; returns whether it fits, and the largest batch that the
                data can fill, or None if unknown.

        Returns:
            Each size that was tried and whether it fits.
        """
        tried: dict[int, bool] = {}
        cap = self.max_val
        size = self.init_val if cap is None else min(self.init_val, cap)
        while len(tried) < self.max_trials:
            fits, num_samples = try_size(size)
            if num_samples is not None:
                cap = num_samples if cap is None else min(cap, num_samples)
                size = min(size, num_samples)  # the batch that was tried had all samples
            tried[size] = fits
            next_size = self._next_size(tried, cap)
            if next_size is None or next_size in tried:
                break
            size = next_size
        return tried

    def _next_size(self, tried: dict[int, bool], cap: int | None) -> int | None:
        """Return the size to try next; None if the result is known."""
        low = max((size for size, fits in tried.items() if fits), default=0)
        high = min((size for size, fits in tried.items() if not fits), default=None)
        if high is None:
            next_size = 2 * low if cap is None else min(2 * low, cap)
            return next_size if next_size > low else None
        if low == 0:
            return high // 2 or None
        if self.mode == "power" or high - low == 1:
            return None
        return (low + high) // 2


def _batch_start_hook(method: str) -> Callable[..., None]:
    """Return the batch-start hook of an entry point, which records the batch's size."""

    def record(self: Any, trainer: Trainer, module: TrainModule, batch: Any, *index: int) -> None:
        if method == self.method:
            self.largest_seen = max(self.largest_seen, find_batch_size(batch) or 0)
            self.one_batch &= index[0] == 0

    return record


@dataclass
class _BatchRecorder(Callback):
    """Runs a trial on this process alone, and records the sizes of its batches.

    Attributes:
        method: The entry point whose batches are sized.
        steps: Updates.
        reserve: Allocate the gradient buffers that the engine of several processes needs.
        largest_seen: Samples in the largest batch of this entry point; 0 if unknown.
        one_batch: Whether no loader of this entry point had a second batch.
        available: Samples in the largest of its datasets; None if unknown without reading.
    """

    method: str
    steps: int
    reserve: bool
    largest_seen: int = 0
    one_batch: bool = True
    available: int | None = None
    _buffers: list[Tensor] = field(default_factory=list)

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Prevent parts of the module from running collectives."""
        for part in module.modules():
            if hasattr(part, "distributed_available_fn"):  # torchmetrics
                vars(part)["distributed_available_fn"] = lambda: False

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        run = trainer._fit_run("on_fit_start")
        run.stopping.ignore_signals()  # signals take effect after the trial
        weighting = run.optim.weighting
        weighting.reference = weighting.reference or 1.0  # do not wait for rank 0's reference
        self.available = _max_num_samples([run.data.epoch_iterator])
        if self.reserve:
            self._buffers = [
                torch.empty_like(p) for p in run.optim.parameters.all if p.requires_grad
            ]

    on_train_batch_start = _batch_start_hook("fit")
    on_validation_batch_start = _batch_start_hook("validate")
    on_test_batch_start = _batch_start_hook("test")
    on_predict_batch_start = _batch_start_hook("predict")

    def max_batch_size(self, size: int) -> int | None:
        """Return the largest batch that the data can fill, after trying a size; None if unknown.

        If the number of samples is unknown, data with a single batch cannot fill a larger one.
        """
        if 0 < self.largest_seen < size:
            return self.largest_seen
        if self.available is None and self.one_batch and self.steps > 1:
            return size
        return self.available


def _max_num_samples(epoch_iterators: Sequence[EpochIterator]) -> int | None:
    """Return the number of samples in the largest of these; None if unknown without reading."""
    sizes = []
    for iterator in epoch_iterators:
        # A stream's length need not be its number of samples.
        if isinstance(iterator.dataset, IterableDataset) or iterator.num_samples is None:
            return None
        sizes.append(iterator.num_samples)
    return max(sizes, default=None)


@dataclass(frozen=True, kw_only=True)
class TrialTarget:
    """The module, data and entry point whose batch size is searched.

    Attributes:
        trainer: The user's Trainer.
        module: The user's module.
        loaders: Loaders to recreate with other batch sizes; None if the module or datamodule has
            them.
        val_loaders: The validation loaders of a fit, unchanged.
        datamodule: The user's datamodule, or None.
        method: The entry point.
        attribute: The attribute with the batch size, if no loaders are given.
        accumulates: Whether updates have several micro-batches, so that gradients exist during a
            forward pass.
    """

    trainer: Trainer
    module: TrainModule
    loaders: Any
    val_loaders: Any
    datamodule: Any
    method: str
    attribute: str
    accumulates: bool

    def __post_init__(self) -> None:
        """Check that there is a batch size that can be changed."""
        if self.loaders is not None:
            with_batch_size(self.loaders, 1)
        elif not owners_of(self.attribute, self.module, self.datamodule):
            raise ValueError(
                f"No batch size can be set: neither {type(self.module).__name__}, its hparams nor "
                f"the datamodule has an attribute {self.attribute!r}. Pass the loaders, or name "
                "the attribute with batch_arg_name."
            )

    def attempt(self, size: int, steps: int) -> tuple[bool, int | None]:
        """Try a size on each process; collective.

        Returns:
            Whether it fits on all processes; the largest batch that the data can fill, or None.
        """
        error: Exception | None = None
        fits, num_samples = True, None
        try:
            num_samples = self._run(size, steps)
        except Exception as raised:  # noqa: BLE001 - raised below, after the others were informed
            if is_out_of_memory(raised):
                fits = False
            else:
                error = raised
        # An out-of-memory error has been released by now, with the frames that hold tensors.
        exchange(error, "Tuner.scale_batch_size")
        free_caches()
        outcomes = all_gather_object((fits, num_samples))
        fits = all(fits_rank for fits_rank, _ in outcomes)
        logger.info("A batch size of %d %s into memory.", size, "fits" if fits else "does not fit")
        sizes = [number for _, number in outcomes if number is not None]
        return fits, min(sizes, default=None)

    def _run(self, size: int, steps: int) -> int | None:
        settings: dict[str, Any] = {
            "gradient_accumulation_steps": 2 if self.accumulates else 1,
            "limit_train_batches": None,
            "overfit_batches": None,
            "val_every": steps,
        }
        trainer = self.trainer
        for name in ("limit_val_batches", "limit_test_batches", "limit_predict_batches"):
            off = self.method == "fit" and getattr(trainer._context.settings, name) == 0
            settings[name] = 0 if off else steps
        reserve = trainer.accelerator.num_processes > 1
        recorder = _BatchRecorder(self.method, steps, reserve)
        trial = make_trial(trainer, recorder, steps, alone=True, **settings)
        module, (loaders, val_loaders, datamodule) = copy_for_trial(
            self.module,
            (self.loaders, self.val_loaders, self.datamodule),
            [trainer, trainer.accelerator],
        )
        if loaders is None:
            owners = owners_of(self.attribute, module, datamodule)
            set_attribute(owners, self.attribute, size)
        else:
            loaders = with_batch_size(loaders, size)
        with isolated_rng():
            if self.method == "fit":
                trial.fit(module, loaders, val_loaders, datamodule=datamodule)
            else:
                with trial._evaluation(self.method, module, loaders, datamodule, None) as run:
                    recorder.available = _max_num_samples(run.eval_iterators)
                    if self.method == "predict":
                        predict(run, keep=False)
                    else:
                        phase = VALIDATION if self.method == "validate" else TEST
                        evaluate(run, phase)
        return recorder.max_batch_size(size)


def with_batch_size(loaders: Any, size: int) -> Any:
    """Return a loader, or each of several, with another batch size.

    Raises:
        ValueError: One of them does not have a fixed batch size.
    """
    if isinstance(loaders, CombinedLoader):
        return CombinedLoader(with_batch_size(loaders.iterables, size), loaders.mode)
    if isinstance(loaders, (list, tuple)):
        return [with_batch_size(loader, size) for loader in loaders]
    if isinstance(loaders, Mapping):
        return {name: with_batch_size(loader, size) for name, loader in loaders.items()}
    has_own_reading = isinstance(loaders, DataLoader) and not has_torch_iteration(type(loaders))
    if not isinstance(loaders, DataLoader) or loaders.batch_size is None or has_own_reading:
        raise ValueError(
            f"A {type(loaders).__name__} cannot be given another batch size: it is not a plain "
            "DataLoader with a batch_size. Create the loader in train_dataloader() from an "
            "attribute, and name that with batch_arg_name."
        )
    kwargs = reading_kwargs(loaders) | {"batch_size": size, "drop_last": loaders.drop_last}
    if not isinstance(loaders.dataset, IterableDataset):
        kwargs["sampler"] = loaders.sampler
    return DataLoader(**kwargs)


def search_batch_size(
    target: TrialTarget, search: SizeSearch, *, effective: int | None
) -> BatchSizeSearch:
    """Find the largest size that fits on all processes; collective.

    Args:
        target: The module, data and entry point.
        search: The sizes to try.
        effective: The number of samples per update over all processes, kept constant by
            accumulation.

    Raises:
        RuntimeError: No size fits.
    """
    trainer = target.trainer
    steps = trainer._context.settings.gradient_accumulation_steps
    dp_size = trainer.accelerator.engine.parallel.dp_size
    rank_batch_size = None if effective is None else effective // dp_size
    if rank_batch_size is not None:
        search = replace(search, max_val=min(rank_batch_size, search.max_val or rank_batch_size))
    with isolate(target.module):
        tried = search.run(lambda size: target.attempt(size, search.steps_per_trial))
    fitting_sizes = [size for size, fits in tried.items() if fits]
    if not fitting_sizes:
        raise RuntimeError(
            f"No batch size fits into memory; tried {', '.join(map(str, tried))} samples."
        )
    size = max(fitting_sizes)
    if search.mode == "binsearch" and not all(tried.values()):
        size = max(1, int(size * (1 - search.margin)))
    if rank_batch_size is not None:
        size = next(divisor for divisor in range(size, 0, -1) if rank_batch_size % divisor == 0)
        steps = rank_batch_size // size
    return BatchSizeSearch(batch_size=size, gradient_accumulation_steps=steps, trials=tried)


def check_effective(effective: int, method: str, module: TrainModule, world_size: int) -> None:
    """Check that accumulation can keep an effective batch size.

    Raises:
        ValueError: Accumulation cannot keep it.
        TypeError: The size is not a number.
    """
    check_counts(1, effective_batch_size=effective)
    if effective % world_size:
        raise ValueError(
            f"effective_batch_size is {effective}; it must be a positive multiple of the number of "
            f"processes, {world_size}."
        )
    if method != "fit":
        raise ValueError(f"effective_batch_size applies to updates, and {method} makes none.")
    if not module.automatic_optimization:
        raise ValueError(
            "effective_batch_size is kept by accumulation, which training_step controls in "
            "manual optimisation; leave it out."
        )
