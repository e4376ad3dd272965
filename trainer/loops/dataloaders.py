"""Checks the user's loaders, makes epoch iterators, and creates the loaders again if requested."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.accelerator import Accelerator
from trainer.checkpoint.storage import read_manifest
from trainer.data.combined import CombinedLoader, holds_loaders
from trainer.data.epoch_iterator import EpochIterator
from trainer.data.sampler import DataShard
from trainer.data.seeding import isolated_generators, module_generators
from trainer.datamodule import DataModule
from trainer.distributed.objects import all_gather_object, broadcast_object
from trainer.distributed.process_control import on_all
from trainer.errors import module_logger
from trainer.hooks import call_if_there, check_step_signature, hook_typo, is_overridden
from trainer.loops.config import Settings, apply_limit, require_length
from trainer.loops.state import Counters
from trainer.module import TrainModule
from trainer.rng import isolated_rng, mix, set_seed

if TYPE_CHECKING:
    from trainer.loops.lifecycle import RunContext

logger = module_logger(__name__)

# For each stage: its step, the hook that returns its loaders, and the argument for loaders.
STEPS = {
    "fit": ("training_step", "train_dataloader", "train_dataloaders"),
    "validate": ("validation_step", "val_dataloader", "dataloaders"),
    "test": ("test_step", "test_dataloader", "dataloaders"),
    "predict": ("predict_step", "predict_dataloader", "dataloaders"),
}

_KINDS = ("train", "validate", "test", "predict")  # kinds of data; the index is part of the seed


def take_datamodule(argument: str, loaders: Any, datamodule: Any) -> tuple[Any, Any]:
    """Return (loaders, datamodule); the user may have passed a datamodule in place of loaders.

    Args:
        argument: The name of the argument for loaders, for errors.
        loaders: Its value.
        datamodule: The value of the argument ``datamodule``.

    Raises:
        ValueError: Two datamodules were passed.
        TypeError: An argument is a class, or the datamodule has none of a DataModule's methods.
    """
    for name, value in ((argument, loaders), ("datamodule", datamodule)):
        if isinstance(value, type):
            raise TypeError(
                f"{name} is the class {value.__name__}; pass an instance: {value.__name__}()."
            )
    methods = [name for name in vars(DataModule) if not name.startswith("_") and name != "trainer"]
    if datamodule is not None and not any(hasattr(datamodule, name) for name in methods):
        raise TypeError(
            f"datamodule is {datamodule!r} of type {type(datamodule).__name__}, which has none of "
            f"a DataModule's methods, such as {STEPS['fit'][1]}. (Weights to load are passed by "
            "name: ckpt_path=….)"
        )
    if not isinstance(loaders, DataModule):
        return loaders, datamodule
    if datamodule is not None:
        raise ValueError(f"{argument} and datamodule are both data modules; pass one of them.")
    return None, loaders


def loaders_for(stage: str, given: Any, module: TrainModule, datamodule: Any) -> list[Any]:
    """Return the loaders of a stage: those given, else the datamodule's, else the module's.

    Args:
        stage: fit, validate, test or predict.
        given: A loader, a list of loaders, or None.
        module: The user's module.
        datamodule: An object with loader hooks, or None.

    Raises:
        ValueError: Loaders were given twice, or there are none.
        TypeError: `given` is neither a loader nor a list of loaders.
    """
    _, hook, argument = STEPS[stage]
    loaders = find_loaders(hook, given, module, datamodule, argument)
    if not loaders:
        owners = [(datamodule, DataModule), (module, TrainModule)]
        without_loader = [
            type(one).__name__ for one, base in owners if is_overridden(one, hook, base)
        ]
        why = (
            f"{hook} of {' and of '.join(without_loader)} returned no loader. "
            if without_loader
            else ""
        )
        raise ValueError(
            f"{stage} has no data. {why}Return a loader from {hook}, or pass {argument} or a "
            "datamodule."
        )
    return loaders


def find_loaders(
    hook: str, given: Any, module: TrainModule, datamodule: Any, argument: str
) -> list[Any]:
    """Return the loaders as `loaders_for` does, but an empty list if there are none."""
    if given is not None and datamodule is not None:
        raise ValueError(f"Pass {argument} or datamodule, not both.")
    if given is None:
        given = None if datamodule is None else call_if_there(datamodule, hook)
        if given is None:
            given = call_if_there(module, hook)
        if given is None or (isinstance(given, list) and not given):
            return []
    several = isinstance(given, (tuple, MutableSequence))  # Hydra's lists are not Python lists
    if several and any(one is None for one in given):
        raise TypeError(f"{argument} is a list with None in it; every item must be a loader.")
    if isinstance(given, CombinedLoader) and given.mode == "sequential":
        return given.flattened if argument != "train_dataloaders" else [given]
    if holds_loaders(given):
        if argument == "train_dataloaders":
            given = given if isinstance(given, (Mapping, tuple)) else list(given)
            return [CombinedLoader(given, "max_size_cycle")]
        return list(given.values() if isinstance(given, Mapping) else given)
    if isinstance(given, (str, bytes, Mapping)):
        raise TypeError(
            f"{argument} is a {type(given).__name__}; give a DataLoader or another iterable of "
            "batches, or a list or dict of them."
        )
    if hasattr(given, "shape") and hasattr(given, "dtype"):  # a tensor or an array
        raise TypeError(
            f"{argument} is a {type(given).__name__} of shape {tuple(given.shape)}. Wrap it: "
            "DataLoader(TensorDataset(x, y), batch_size=32), or list(...) if its rows are batches."
        )
    return [given]


def make_epoch_iterators(
    kind: str,
    loaders: Sequence[Any],
    settings: Settings,
    accelerator: Accelerator,
    *,
    seed: int,
    may_be_empty: bool = False,
) -> list[EpochIterator]:
    """Create the epoch iterators of loaders, with the Trainer's limits on batches; collective.

    Args:
        kind: train, validate, test or predict.
        loaders: The user's loaders.
        settings: The Trainer's arguments, such as the limits.
        accelerator: The accelerator, over whose ranks the data are sharded.
        seed: The seed of the shuffled order.
        may_be_empty: Only warn if a loader is empty.

    Raises:
        ValueError: A loader is empty, or its length differs between ranks.
    """
    shard = DataShard(
        rank=accelerator.engine.parallel.dp_rank,
        world_size=accelerator.engine.parallel.dp_size,
        presharded=accelerator.dataloader_config.presharded,
    )
    name, limit = settings.limit(kind)
    if settings.fast_dev_run and limit:
        limit *= shard.world_size  # that many batches on each rank
    epoch_iterators = []
    for number, loader in enumerate(loaders):
        epoch_iterator = EpochIterator(
            loader.as_single_loader() if isinstance(loader, CombinedLoader) else loader,
            shard,
            seed=seed,
            loader_id=0 if kind == "train" else mix(_KINDS.index(kind), number),
            shuffle=not settings.overfits(kind),
            remember=kind == "train",
        )
        epoch_iterator.check_presharded()
        apply_limit(epoch_iterator, name, limit)
        which = f"{kind} loader" if len(loaders) == 1 else f"{kind} loader number {number}"
        check_same_data(epoch_iterator, which)
        if epoch_iterator.num_batches == 0:
            check = f"{name} is 0" if limit == 0 else "check its dataset, its sampler and drop_last"
            if not may_be_empty:
                raise ValueError(f"The {which} is empty: {check}.")
            if accelerator.is_main_process:
                result = "Nothing is trained" if kind == "train" else "It is left out"
                logger.warning("The %s is empty: %s. %s.", which, check, result)
        epoch_iterators.append(epoch_iterator)
    return epoch_iterators


def are_empty(epoch_iterators: Sequence[EpochIterator]) -> bool:
    """Return whether no loader has a batch; False if a dataset is iterable (unknown)."""
    return all(iterator.num_batches == 0 for iterator in epoch_iterators)


def check_same_data(epoch_iterator: EpochIterator, which: str) -> None:
    """Raise if a loader's length or samples differ between ranks; collective.

    With different lengths, ranks would deadlock. With different samples, most would be skipped.

    Args:
        epoch_iterator: The epoch iterator of the loader.
        which: A description of the loader, for the error.

    Raises:
        ValueError: They differ; raised on all ranks.
    """
    found = all_gather_object((epoch_iterator.num_batches, epoch_iterator.samples_mark))
    lengths = [length for length, _ in found]
    if any(length != lengths[0] for length in lengths):
        raise ValueError(
            f"The {which} has a different number of batches on each process: "
            f"{', '.join(f'rank {r}: {n}' for r, n in enumerate(lengths))}. Give every process "
            "the same dataset, batch size and sampler length; the Trainer shards the data."
        )
    if differing := [str(rank) for rank, (_, mark) in enumerate(found) if mark != found[0][1]]:
        raise ValueError(
            f"The dataset of the {which} has different samples on rank {', '.join(differing)} "
            "than on rank 0. Give every process the whole dataset, and the Trainer shards it: "
            "leave out split_dataset_by_node and shard, and give random_split a generator with a "
            "fixed seed."
        )


def validation_loaders(
    given: Any, module: TrainModule, datamodule: Any, settings: Settings
) -> list[Any]:
    """Return the validation loaders of a fit; an empty list if no validation is to run.

    That is the case without data, without `validation_step`, or with ``limit_val_batches=0``.

    Args:
        given: The loaders passed to `fit`, or None.
        module: The user's module.
        datamodule: The user's datamodule, or None.
        settings: The Trainer's arguments.

    Raises:
        TypeError: Loaders were passed, but the module has no `validation_step`.
    """
    if settings.limit_val_batches == 0:
        return []
    if not is_overridden(module, "validation_step", TrainModule):
        if given is None:
            return []
        raise TypeError(
            f"fit got val_dataloaders, but {type(module).__name__} does not define "
            "validation_step(self, batch, batch_idx)."
            f"{hook_typo(module, 'validation_step', TrainModule)}"
        )
    return find_loaders("val_dataloader", given, module, datamodule, "val_dataloaders")


def check_step(stage: str, module: TrainModule, epoch_iterators: Sequence[EpochIterator]) -> None:
    """Check that a step's signature matches the number of loaders.

    Raises:
        TypeError: The step lacks ``dataloader_idx`` with several loaders, or requires it with one.
    """
    if epoch_iterators:
        check_step_signature(module, STEPS[stage][0], len(epoch_iterators))


_UNKNOWN = -1
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


class FitLoaders:
    """The loaders of a fit, passed to `fit` or from hooks, which may be called every few epochs.

    Args:
        context: The Trainer's components.
        module: The user's module.
        train: The training loader that was passed to `fit`.
        val: The validation loaders that were passed to `fit`.
        datamodule: The datamodule that was passed to `fit`.

    Attributes:
        epoch_iterator: The epoch iterator of the training data.

    Raises:
        ValueError: ``reload_dataloaders_every_n_epochs`` is set, but loaders were passed to `fit`.
    """

    epoch_iterator: EpochIterator

    def __init__(
        self, context: RunContext, module: TrainModule, train: Any, val: Any, datamodule: Any
    ) -> None:
        self._context, self._owners = context, (module, datamodule)
        self._train, self._val = train, val
        self._length: int | None = _UNKNOWN
        every = context.settings.reload_dataloaders_every_n_epochs
        for argument, given in (("train", train), ("val", val)):
            if every and given is not None:
                raise ValueError(
                    f"reload_dataloaders_every_n_epochs is {every}, but fit got "
                    f"{argument}_dataloaders, which fit cannot create again. Define "
                    f"{argument}_dataloader in the module or in a DataModule instead, or leave "
                    "reload_dataloaders_every_n_epochs at 0."
                )

    def begin(self, chosen: Path | None, begun: Counters) -> Origin:
        """Return the origin of the first loaders, after seeding the global RNG if there is a seed.

        Args:
            chosen: The checkpoint that the fit resumes from, if any.
            begun: The progress with which a new run begins.
        """
        seed = self._context.settings.seed
        if seed is not None:
            set_seed(seed)
        if chosen is not None and (saved := read_manifest(chosen).get("loaders")):
            self._origin = Origin(**saved)
        else:
            seed = broadcast_object(torch.initial_seed()) if seed is None else seed
            self._origin = Origin(epoch=begun.epoch, step=begun.global_step, seed=seed)
        return self._origin

    def make(self) -> list[EpochIterator]:
        """Create the first loaders; return the validation epoch iterators; collective.

        Raises:
            ValueError: A loader is empty.
            TypeError: There is validation data but no ``validation_step``.
            RuntimeError: A hook failed on another rank.
        """
        return self._take(self._origin, *on_all(lambda: self._call(self._origin), "fit"))

    def describe(self) -> dict[str, int]:
        """Return the origin of the loaders, for the manifest of a checkpoint."""
        return asdict(self._origin)

    def begin_epoch(self) -> None:
        """Store the number of batches of the new epoch, since every update may need it."""
        self._length = self.epoch_iterator.num_batches

    def num_batches(self) -> int | None:
        """Return the batches of all ranks in the epoch; None if unknown until the data is read."""
        return self.epoch_iterator.num_batches if self._length == _UNKNOWN else self._length

    def _call(self, origin: Origin) -> tuple[list[Any], list[Any]]:
        """Return the training and the validation loaders, from the hooks if none were passed.

        If the hooks are called every few epochs, they run under an RNG that is seeded from the
        run's seed and the epoch, so that a resumed run draws the same random numbers.
        """
        settings, owners = self._context.settings, self._owners
        again = settings.reload_dataloaders_every_n_epochs
        drawn = mix(origin.seed, origin.epoch, _DRAWS_BY_LOADERS)
        generators = module_generators(*owners) if again else {}
        with (
            isolated_rng(drawn) if again else nullcontext(),
            isolated_generators(generators, mix(drawn, 1)),
        ):
            loaders = loaders_for("fit", self._train, *owners)
            return loaders, validation_loaders(self._val, *owners, settings)

    def _take(self, origin: Origin, loaders: list[Any], val: list[Any]) -> list[EpochIterator]:
        """Create the epoch iterators of loaders, with the Trainer's limits; collective.

        Args:
            origin: The run's progress when the loaders were created.
            loaders: The training loader, in a list.
            val: The validation loaders.

        Returns:
            The validation epoch iterators.

        Raises:
            ValueError: A loader is empty.
        """
        context, settings = self._context, self._context.settings
        make = partial(
            make_epoch_iterators,
            settings=settings,
            accelerator=context.accelerator,
            seed=origin.seed,
            may_be_empty=context.may_be_empty,
        )
        (epoch_iterator,) = make("train", loaders)
        val_iterators = make("validate", val)
        if are_empty(val_iterators):
            val_iterators = []
        check_step("validate", self._owners[0], val_iterators)
        require_length(epoch_iterator, val_every=settings.val_every, log_every=settings.log_every)
        self.epoch_iterator, self._origin = epoch_iterator, origin
        return val_iterators

    def reload_if_due(
        self, counters: Counters, val_iterators: list[EpochIterator]
    ) -> list[EpochIterator]:
        """Create the loaders again if due in this epoch, and end the old loaders' workers.

        Args:
            counters: The run's progress.
            val_iterators: The validation epoch iterators so far.

        Returns:
            The iterators to use from now on.

        Raises:
            ValueError: A loader is empty; or there is no longer any validation data.
            RuntimeError: A hook failed on another rank.
        """
        every = self._context.settings.reload_dataloaders_every_n_epochs
        if not every or counters.epoch % every:
            return val_iterators
        origin = Origin(
            epoch=counters.epoch, step=counters.global_step, seed=self.epoch_iterator.seed
        )
        for old in (self.epoch_iterator, *val_iterators):
            old.close()

        def call() -> tuple[list[Any], list[Any]]:
            loaders, val_loaders = self._call(origin)
            if val_iterators and not val_loaders:
                raise ValueError(
                    f"val_dataloader returned nothing in epoch {counters.shown_epoch}, so a "
                    "validation that was due could not run. Return loaders in every epoch; "
                    "set val_every to validate less often."
                )
            return loaders, val_loaders

        loaders, val_loaders = on_all(call, "reload_dataloaders_every_n_epochs")
        return self._take(origin, loaders, val_loaders)
