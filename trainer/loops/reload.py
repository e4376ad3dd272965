"""The loaders of a fit: made when it begins and, where asked for, anew every few epochs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainer import checkpoint as disk
from trainer.accelerator import Accelerator
from trainer.data.feed import Feed
from trainer.data.own_generators import set_aside
from trainer.distributed.collectives import broadcast_object
from trainer.distributed.control import on_all
from trainer.loops.lengths import require_length
from trainer.loops.loaders import check_step, feeds_for, loaders_for, validation_loaders
from trainer.loops.randomness import kept_by
from trainer.loops.run import FitRun
from trainer.loops.settings import Settings
from trainer.module import TrainModule
from trainer.rng import isolated_rng, mix, set_seed

_DRAWS_BY_LOADERS = 5  # tells their seeds from those of an epoch's order and of batch hooks


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where the run stood when the loaders in use were made, for a resumed one to make them again.

    Attributes:
        epoch: ``trainer.current_epoch`` as the hooks saw it.
        step: ``trainer.global_step`` likewise.
        seed: The seed of the order of the data.
    """

    epoch: int = 0
    step: int = 0
    seed: int

    def describe(self) -> dict[str, int]:
        """For the manifest of a checkpoint."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the loaders of a fit come from.

    Attributes:
        settings: The Trainer's.
        accelerator: Among how many processes they are shared out.
        module: The user's.
        train: As given to `fit`.
        val: Likewise.
        datamodule: Likewise.

    Raises:
        ValueError: Loaders are to be made anew, but were given ready-made.
    """

    settings: Settings
    accelerator: Accelerator
    module: TrainModule
    train: Any
    val: Any
    datamodule: Any

    def __post_init__(self) -> None:
        """Refuse loaders that nobody could make again."""
        every = self.settings.reload_dataloaders_every_n_epochs
        for argument, hook in (("train", "train_dataloader"), ("val", "val_dataloader")):
            if every and getattr(self, argument) is not None:
                raise ValueError(
                    f"reload_dataloaders_every_n_epochs is {every}, but fit was given "
                    f"{argument}_dataloaders, which it cannot make anew. Define {hook} in the "
                    "module or in a DataModule in its place, or leave "
                    "reload_dataloaders_every_n_epochs at 0."
                )

    def origin(self, chosen: Path | None) -> Origin:
        """Where the first loaders are made; generators are seeded for them.

        Args:
            chosen: The checkpoint that the fit goes on from, if any.
        """
        seed = self.settings.seed
        if seed is not None:
            set_seed(seed)
        if chosen is not None and (saved := disk.read_manifest(chosen).get("loaders")):
            return Origin(**saved)
        return Origin(seed=broadcast_object(torch.initial_seed()) if seed is None else seed)

    def make(self, origin: Origin) -> tuple[Feed, list[Feed]]:
        """The training feed, and those of the validation; collective.

        Raises:
            ValueError: There is not one training loader, or a loader is empty.
            TypeError: There is validation data but no ``validation_step``.
            RuntimeError: On the processes that fared well, where a hook of another one failed.
        """
        return self.feeds(origin, *on_all(lambda: self.call(origin), "fit"))

    def call(self, origin: Origin) -> tuple[list[Any], list[Any]]:
        """The loaders for training and for validation, from the hooks if none were given.

        Where the hooks are called again, what they draw is a function of the seed and the epoch, so
        that a resumed run draws the same.
        """
        again = self.settings.reload_dataloaders_every_n_epochs
        drawn = mix(origin.seed, origin.epoch, _DRAWS_BY_LOADERS)
        owners = self.module, self.datamodule
        own = kept_by(*owners) if again else {}
        with isolated_rng(drawn) if again else nullcontext(), set_aside(own, mix(drawn, 1)):
            loaders = loaders_for("fit", self.train, *owners)
            return loaders, validation_loaders(self.val, *owners, self.settings)

    def feeds(self, origin: Origin, loaders: list[Any], val: list[Any]) -> tuple[Feed, list[Feed]]:
        """The feeds of what `call` returned, within their limits; collective."""
        if len(loaders) > 1:
            raise ValueError(
                f"fit was given {len(loaders)} training loaders; it takes one. Read them by one, "
                "of a torch.utils.data.StackDataset or ConcatDataset, or pass an object whose "
                "__iter__ yields the joint batches."
            )
        settings, accelerator = self.settings, self.accelerator
        (feed,) = feeds_for("train", loaders, settings, accelerator, seed=origin.seed)
        val_feeds = feeds_for("validate", val, settings, accelerator, seed=origin.seed)
        check_step("validate", self.module, val_feeds)
        require_length(feed, val_every=settings.val_every, log_every=settings.log_every)
        return feed, val_feeds


def reloader(run: FitRun, sources: Sources) -> Callable[[], None]:
    """What is called as an epoch begins: it gives the run new loaders every few epochs."""
    every = sources.settings.reload_dataloaders_every_n_epochs

    def reload() -> None:
        if run.counters.epoch % every == 0:
            _reload(run, sources)

    return reload if every else lambda: None


def _reload(run: FitRun, sources: Sources) -> None:
    """Make the loaders of the epoch at hand; the workers of the old ones end.

    Raises:
        ValueError: See `Sources.make`; or there is no validation data any more.
        RuntimeError: On the processes that fared well, where another one did not.
    """
    counters = run.counters
    origin = Origin(epoch=counters.epoch, step=counters.global_step, seed=run.feed.seed)
    for old in (run.feed, *run.val_feeds):
        old.close()

    def call() -> tuple[list[Any], list[Any]]:
        loaders, val_loaders = sources.call(origin)
        if run.val_feeds and not val_loaders:
            raise ValueError(
                f"val_dataloader gave nothing in epoch {counters.epoch}, so that validations that "
                "are due could not run. Return the loaders of before; val_every says how often to "
                "validate."
            )
        return loaders, val_loaders

    loaders, val_loaders = on_all(call, "reload_dataloaders_every_n_epochs")
    run.feed, run.val_feeds = sources.feeds(origin, loaders, val_loaders)
    run.loaders = origin.describe()
