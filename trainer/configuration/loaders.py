"""How prepared data loaders divide the data among processes."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.checks import check_bool_fields, check_type, explains_itself


@explains_itself
@dataclass(kw_only=True)
class DataLoaderConfiguration:
    """How prepared data loaders divide the data among processes.

    Example::

        dataloader_config = DataLoaderConfiguration(use_seedable_sampler=True, non_blocking=True)
        accelerator = Accelerator(dataloader_config=dataloader_config)

    Attributes:
        split_batches: Divide each batch of the user's loader among the processes, so that its size
            is the global batch size; False gives each process whole batches.
        dispatch_batches: The main process reads all batches and sends each process its batches.
            None does so for iterable datasets only.
        even_batches: Give every process the same number of full batches by repeating samples from
            the beginning of the data; `gather_for_metrics` drops these duplicates. The `Trainer`
            ignores this option and never repeats samples.
        use_seedable_sampler: The order of a shuffling loader depends only on a seed and the epoch.
        non_blocking: Copy batches to the device asynchronously, one batch ahead and overlapping
            with computation; useful with pinned memory.
        use_stateful_dataloader: After `load_state`, or a prepared loader's ``load_state_dict``, the
            next pass continues after the last batch that was read; `skip_first_batches` is not
            needed. It works for any loader and does not need torchdata.
        data_seed: The seed of the order; None takes the seed of ``set_seed``.
        presharded: The stream of each process is already a different part of the data, and each
            process reads all of its stream. Streams split by
            ``datasets.distributed.split_dataset_by_node`` or webdataset's ``split_by_node`` are
            detected without this option.

    Raises:
        TypeError: A value is not a bool (or, for `dispatch_batches`, None), or `data_seed` is not
            an int.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    data_seed: int | None = None
    presharded: bool = False

    def __post_init__(self) -> None:
        """Check the types."""
        check_bool_fields(self)
        check_type("data_seed", self.data_seed, int)
