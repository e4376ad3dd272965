"""Create the data loaders of a fit: at its start and, on request, again every few epochs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainer import checkpoint as disk
from trainer.accelerator import Accelerator
from trainer.data.feed import Feed
from trainer.data.own_generators import set_aside
from trainer.distributed.control import on_all
from trainer.distributed.objects import broadcast_object
from trainer.loops.lengths import require_length
from trainer.loops.loaders import check_step, feeds_for, loaders_for, validation_loaders
from trainer.loops.randomness import kept_by
from trainer.loops.run import FitRun
from trainer.loops.settings import Settings
from trainer.module import TrainModule
from trainer.rng import isolated_rng, mix, set_seed

_DRAWS_BY_LOADERS = 5  # mixed into the loader hooks' seeds, so that they differ from other seeds


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The run's progress when the current loaders were created.

    A checkpoint holds it, so that a resumed run calls the loader hooks under the same conditions.

    Attributes:
        epoch: ``trainer.current_epoch`` as the loader hooks saw it.
        step: ``trainer.global_step`` as the loader hooks saw it.
        seed: The seed of the shuffled order.
    """

    epoch: int = 0
    step: int = 0
    seed: int

    def describe(self) -> dict[str, int]:
        """Return the fields for the manifest of a checkpoint."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the loaders of a fit come from: arguments of `fit`, or hooks.

    Attributes:
        settings: The Trainer's arguments.
        accelerator: The accelerator, over whose ranks the data are sharded.
        module: The user's module.
        train: The training loader that was passed to `fit`.
        val: The validation loaders that were passed to `fit`.
        datamodule: The datamodule that was passed to `fit`.

    Raises:
        ValueError: ``reload_dataloaders_every_n_epochs`` is set, but loaders were passed to `fit`.
    """

    settings: Settings
    accelerator: Accelerator
    module: TrainModule
    train: Any
    val: Any
    datamodule: Any

    def __post_init__(self) -> None:
        """Raise if loaders were passed to `fit` that would have to be created again."""
        every = self.settings.reload_dataloaders_every_n_epochs
        for argument, hook in (("train", "train_dataloader"), ("val", "val_dataloader")):
            if every and getattr(self, argument) is not None:
                raise ValueError(
                    f"reload_dataloaders_every_n_epochs is {every}, but fit was given "
                    f"{argument}_dataloaders, which it cannot create again. Define {hook} in the "
                    "module or in a DataModule instead, or leave "
                    "reload_dataloaders_every_n_epochs at 0."
                )

    def origin(self, chosen: Path | None) -> Origin:
        """Return the origin of the first loaders, after seeding the global RNG if there is a seed.

        Args:
            chosen: The checkpoint that the fit resumes from, if any.
        """
        seed = self.settings.seed
        if seed is not None:
            set_seed(seed)
        if chosen is not None and (saved := disk.read_manifest(chosen).get("loaders")):
            return Origin(**saved)
        return Origin(seed=broadcast_object(torch.initial_seed()) if seed is None else seed)

    def make(self, origin: Origin) -> tuple[Feed, list[Feed]]:
        """Create the loaders; return the training and validation epoch iterators; collective.

        Args:
            origin: The run's progress.

        Raises:
            ValueError: There is not exactly one training loader, or a loader is empty.
            TypeError: There is validation data but no ``validation_step``.
            RuntimeError: A hook failed on another rank.
        """
        return self.feeds(origin, *on_all(lambda: self.call(origin), "fit"))

    def call(self, origin: Origin) -> tuple[list[Any], list[Any]]:
        """Return the training and the validation loaders, from the hooks if none were passed.

        If the hooks are called every few epochs, they run under an RNG that is seeded from the
        run's seed and the epoch, so that a resumed run draws the same random numbers.

        Args:
            origin: The run's progress.
        """
        again = self.settings.reload_dataloaders_every_n_epochs
        drawn = mix(origin.seed, origin.epoch, _DRAWS_BY_LOADERS)
        owners = self.module, self.datamodule
        own = kept_by(*owners) if again else {}
        with isolated_rng(drawn) if again else nullcontext(), set_aside(own, mix(drawn, 1)):
            loaders = loaders_for("fit", self.train, *owners)
            return loaders, validation_loaders(self.val, *owners, self.settings)

    def feeds(self, origin: Origin, loaders: list[Any], val: list[Any]) -> tuple[Feed, list[Feed]]:
        """Create the epoch iterators of loaders, with the Trainer's limits; collective.

        Args:
            origin: The run's progress.
            loaders: The training loaders; exactly one.
            val: The validation loaders.

        Returns:
            The training epoch iterator and the validation epoch iterators.

        Raises:
            ValueError: There are several training loaders, or a loader is empty.
        """
        if len(loaders) > 1:
            raise ValueError(
                f"fit was given {len(loaders)} training loaders; it takes one. Combine them in one "
                "loader of a torch.utils.data.StackDataset or ConcatDataset, or pass an object "
                "whose __iter__ yields the joint batches."
            )
        settings, accelerator = self.settings, self.accelerator
        (feed,) = feeds_for("train", loaders, settings, accelerator, seed=origin.seed)
        val_feeds = feeds_for("validate", val, settings, accelerator, seed=origin.seed)
        check_step("validate", self.module, val_feeds)
        require_length(feed, val_every=settings.val_every, log_every=settings.log_every)
        return feed, val_feeds


def reload_if_due(run: FitRun) -> None:
    """Create the loaders again if that is due in this epoch; ends the old loaders' workers.

    Args:
        run: The fit.

    Raises:
        ValueError: See `Sources.make`; or there is no longer any validation data.
        RuntimeError: A hook failed on another rank.
    """
    counters, sources = run.counters, run.sources
    every = sources.settings.reload_dataloaders_every_n_epochs
    if not every or counters.epoch % every:
        return
    origin = Origin(epoch=counters.epoch, step=counters.global_step, seed=run.feed.seed)
    for old in (run.feed, *run.val_feeds):
        old.close()

    def call() -> tuple[list[Any], list[Any]]:
        loaders, val_loaders = sources.call(origin)
        if run.val_feeds and not val_loaders:
            raise ValueError(
                f"val_dataloader returned nothing in epoch {counters.epoch}, so validations that "
                "are due could not run. Return loaders in every epoch; val_every says how often "
                "to validate."
            )
        return loaders, val_loaders

    loaders, val_loaders = on_all(call, "reload_dataloaders_every_n_epochs")
    run.feed, run.val_feeds = sources.feeds(origin, loaders, val_loaders)
    run.origin = origin
