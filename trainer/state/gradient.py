"""`GradientState`: the position in the gradient accumulation window."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from trainer.configuration import GradientAccumulationPlugin
from trainer.state.partial import PartialState
from trainer.state.shared import Shared


class GradientState(Shared):
    """The position in the gradient accumulation window, and the prepared loader being read.

    Example::

        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
            if GradientState().sync_gradients:  # the last micro-batch of its window
                accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)

    Args:
        gradient_accumulation_plugin: The settings of gradient accumulation. Settings given to a
            later instance replace them. None keeps the current ones; the default is one
            micro-batch per update.

    Attributes:
        sync_gradients: Whether this micro-batch is the last of its window, so that gradients are
            all-reduced and the optimizer steps. It may be set.
        plugin: The settings of gradient accumulation.

    Raises:
        TypeError: The argument is not a `GradientAccumulationPlugin`.
        AttributeError: An attribute other than `sync_gradients` is assigned to.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _key: ClassVar[str] = "plugin"
    _settable: ClassVar[frozenset[str]] = frozenset({"sync_gradients", "plugin"})
    _how_to_change: ClassVar[str] = (
        "Pass a GradientAccumulationPlugin to the `Accelerator`, or set its "
        "gradient_accumulation_steps; the prepared loaders set the rest."
    )

    sync_gradients: bool
    plugin: GradientAccumulationPlugin
    _loaders: list[weakref.ref[Any]]
    _kept_end: tuple[int, int | None] | None
    _joins: bool  # whether a `join_uneven_inputs` block is active
    _batches: int | None  # see `_set_batches`
    _before_gather: Callable[[], object] | None  # called once, by `gather_for_metrics`

    def __init__(
        self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    ) -> None:
        if not isinstance(gradient_accumulation_plugin, GradientAccumulationPlugin | None):
            raise TypeError(
                f"gradient_accumulation_plugin is {gradient_accumulation_plugin!r}; it must be a "
                "GradientAccumulationPlugin."
            )
        self.__dict__ = GradientState._shared_state
        if not self.initialized:
            self.sync_gradients = True
            self._loaders = []
            self._kept_end = None
            self._joins = False
            self._batches = None
            self._before_gather = None
            self.plugin = GradientAccumulationPlugin(num_steps=1)
        if gradient_accumulation_plugin is not None:
            self.plugin = gradient_accumulation_plugin

    @property
    def num_steps(self) -> int:
        """The number of micro-batches per optimizer update."""
        assert self.plugin.num_steps is not None  # resolved by the plugin
        return self.plugin.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether a prepared scheduler counts ``step`` calls inside an accumulation window."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a prepared loader ends the accumulation window."""
        return self.plugin.sync_with_dataloader

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are all-reduced after every micro-batch, not only once per window."""
        return self.plugin.sync_each_batch

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The settings of the plugin that differ from their defaults."""
        return self.plugin.to_kwargs()

    @property
    def dataloader_references(self) -> list[Any | None]:
        """None, followed by the prepared loaders being read, the innermost last."""
        return [None, *(loader for ref in self._loaders if (loader := ref()) is not None)]

    @property
    def active_dataloader(self) -> Any | None:
        """The prepared loader being read, the innermost one if nested; None outside a loop."""
        for reference in reversed(self._loaders):
            if (loader := reference()) is not None:
                return loader
        return None

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of its loader; False outside a loop."""
        loader = self.active_dataloader
        return bool(loader is not None and loader.end_of_dataloader)

    @property
    def _data_end_window(self) -> bool:
        """Whether this batch is the end of the data, and so ends the accumulation window.

        All processes that have a batch give the same answer. Inside `join_uneven_inputs`, processes
        have different numbers of batches, so the end of a process's own data must not count: its
        window would end before those of the others. There, only a batch of the last global batch
        counts, and only if the loader is sharded over all processes. If each process reads a
        separate loader, it cannot know when the others end.
        """
        loader = self.active_dataloader
        if loader is None or not self.sync_with_dataloader:
            return False
        if not self._joins:
            return bool(loader.end_of_dataloader)
        return bool(loader._all_end) and loader.world_size == PartialState().num_processes

    @property
    def remainder(self) -> int:
        """The number of samples in the last global batch without padding; -1 if unknown."""
        loader = self.active_dataloader
        return -1 if loader is None else int(loader.remainder)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, loader: Any) -> None:
        # Weak references, because a loader that was left mid-iteration and garbage-collected is no
        # longer being read.
        self._loaders = [*(ref for ref in self._loaders if ref() is not None), weakref.ref(loader)]
        self._kept_end = None

    def _keep_end(self, loader: Any) -> None:
        """Keep the last batch's size if the loop is left at it, as by ``next(iter(loader))``."""
        innermost = self.active_dataloader is loader
        if innermost and loader.end_of_dataloader:
            self._kept_end = loader.remainder, loader.total_batch_size

    def _real_samples(self, samples: int) -> int | None:
        """Return how many of the gathered samples are not padding; None for all, -1 if unknown.

        If a loop was left at its last batch, this is known until another loader is read, but only
        for samples of that one batch, not for samples collected from several batches.

        Args:
            samples: The number of gathered samples.
        """
        if self.in_dataloader:
            real = self.remainder if self.end_of_dataloader else 0
        else:
            real, most = self._kept_end or (0, None)
            real = real if most is not None and samples <= most else 0
        return real or None

    @property
    def _real_parts(self) -> int | None:
        """The number of ranks, from rank 0 on, whose batch is not only padding.

        It is None if all ranks have such a batch, or if the number of samples without padding is
        known (see `_real_samples`).
        """
        parts: int | None = getattr(self.active_dataloader, "_real_batches", self._batches)
        return parts

    @contextmanager
    def _incomplete_batches(self) -> Iterator[None]:
        """Let `_set_batches` hold inside the block."""
        try:
            yield
        finally:
            self._batches = None

    def _set_batches(self, batches: int | None) -> None:
        """Set how many ranks, from rank 0 on, do not run a dummy batch; None means all."""
        self._batches = batches

    @contextmanager
    def _before_gathering(self, function: Callable[[], object]) -> Iterator[None]:
        """Call the function once: before the first `gather_for_metrics`, else on exit."""
        self._before_gather = function
        try:
            yield
        finally:
            self._begin_gather()

    def _begin_gather(self) -> None:
        function, self._before_gather = self._before_gather, None
        if function is not None:
            function()

    @property
    def _batch_sizes(self) -> frozenset[int]:
        """The numbers that could be the sample count of this process's batch; empty if unknown."""
        sizes: frozenset[int] = getattr(self.active_dataloader, "_batch_sizes", frozenset())
        return sizes

    def _remove_dataloader(self, loader: Any) -> None:
        """Remove the latest iteration of a loader; an earlier one may still be running."""
        alive = [ref for ref in self._loaders if ref() is not None]
        for index in reversed(range(len(alive))):
            if alive[index]() is loader:
                del alive[index]
                break
        self._loaders = alive

    def _picklable(self) -> dict[str, Any]:
        # In the process that unpickles it, no loader is being read.
        nothing: dict[str, Any] = {
            "_loaders": [],
            "_kept_end": None,
            "_joins": False,
            "_batches": None,
            "_before_gather": None,
        }
        return {**self.__dict__, **nothing} if self.initialized else {}

    @staticmethod
    def _reset_state() -> None:
        GradientState._shared_state.clear()

    def __repr__(self) -> str:
        if not self.initialized:
            return "GradientState(reset)"
        return (
            f"Sync gradients: {self.sync_gradients}\nAt end of current dataloader: "
            f"{self.end_of_dataloader}\nExtra samples added: {self.remainder}\n"
            f"Gradient accumulation: {self.plugin}\n"
        )
