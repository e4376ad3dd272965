"""The run's position in its window of accumulated micro-batches."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

from trainer.configuration import GradientAccumulationPlugin
from trainer.state.partial import PartialState
from trainer.state.shared import Shared


class GradientState(Shared):
    """The run's position in its window of accumulated micro-batches.

    Args:
        gradient_accumulation_plugin: The window's configuration; a later one replaces it.

    Attributes:
        sync_gradients: Whether this micro-batch ends its window: gradients are synchronised and
            applied. It may be set.
        plugin: The window's configuration.

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
    _joins: bool  # inside a block in which processes without a batch join the others' reductions

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
            self.plugin = GradientAccumulationPlugin(num_steps=1)
        if gradient_accumulation_plugin is not None:
            self.plugin = gradient_accumulation_plugin

    @property
    def num_steps(self) -> int:
        """Micro-batches per update."""
        assert self.plugin.num_steps is not None  # the plugin has resolved it
        return self.plugin.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether a prepared scheduler counts the calls in which it waits for the window to end."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the end of a prepared loader ends the window."""
        return self.plugin.sync_with_dataloader

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are reduced over the processes after every micro-batch."""
        return self.plugin.sync_each_batch

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The plugin's values that differ from their defaults."""
        return self.plugin.to_kwargs()

    @property
    def dataloader_references(self) -> list[Any | None]:
        """The prepared loaders being read, the innermost last, after a first entry of None."""
        return [None, *(loader for ref in self._loaders if (loader := ref()) is not None)]

    @property
    def active_dataloader(self) -> Any | None:
        """The prepared loader being read, the innermost if nested; None outside a loop."""
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
        """Whether the data end the window with this batch, told alike on all that have a batch.

        Where processes join, a process's own end would end its window before the others'. There it
        is the last batch of all, if the loader was dealt to all: a process cannot see the end of
        those that others read by themselves.
        """
        loader = self.active_dataloader
        if loader is None or not self.sync_with_dataloader:
            return False
        if not self._joins:
            return bool(loader.end_of_dataloader)
        return bool(loader._all_end) and loader.world_size == PartialState().num_processes

    @property
    def remainder(self) -> int:
        """The number of samples in the last global batch that are not repeats; -1 if unknown."""
        loader = self.active_dataloader
        return -1 if loader is None else int(loader.remainder)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, loader: Any) -> None:
        # Weak references: a loader that was abandoned mid-iteration and garbage-collected is no
        # longer being read.
        self._loaders = [*(ref for ref in self._loaders if ref() is not None), weakref.ref(loader)]
        self._kept_end = None

    def _keep_end(self, loader: Any) -> None:
        """Keep the last batch's size when a loop is left there, as by ``next(iter(loader))``."""
        innermost = self.active_dataloader is loader
        if innermost and loader.end_of_dataloader:
            self._kept_end = loader.remainder, loader.total_batch_size

    def _real_samples(self, samples: int) -> int | None:
        """Return how many of these gathered samples are not repeats; None for all, -1 if unknown.

        Until another loader is read, this is also known for the last batch of a loop that was left
        there, but not for samples collected from several of its batches.
        """
        if self.in_dataloader:
            real = self.remainder if self.end_of_dataloader else 0
        else:
            real, most = self._kept_end or (0, None)
            real = real if most is not None and samples <= most else 0
        return real or None

    @property
    def _real_parts(self) -> int | None:
        """How many processes, from rank 0 on, have a batch that is not repeated whole.

        None for all, and where the real samples are counted: see `_real_samples`.
        """
        parts: int | None = getattr(self.active_dataloader, "_real_batches", None)
        return parts

    @property
    def _batch_sizes(self) -> frozenset[int]:
        """The numbers that may count the samples in this process's batch; empty if unknown."""
        sizes: frozenset[int] = getattr(self.active_dataloader, "_batch_sizes", frozenset())
        return sizes

    def _remove_dataloader(self, loader: Any) -> None:
        """Remove the loader's latest iteration; an earlier one of the same loader may end later."""
        alive = [ref for ref in self._loaders if ref() is not None]
        for place in reversed(range(len(alive))):
            if alive[place]() is loader:
                del alive[place]
                break
        self._loaders = alive

    def _picklable(self) -> dict[str, Any]:
        # No loader is being read in the process that unpickles it.
        nothing: dict[str, Any] = {"_loaders": [], "_kept_end": None, "_joins": False}
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
