"""Data of other libraries, as their users write it: each sample once, and exact resumes.

The libraries themselves are used. A run and its resumed twin make their data anew, as two starts of
a program do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from callbacks import ModelCheckpoint
from tests.helpers.ranks import RankError
from tests.helpers.requires import requires_datasets, requires_webdataset
from trainer import Accelerator, Trainer, TrainModule

# webdataset leaves it to the garbage collector to close its files
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

SIZE = 26
ALL = list(range(SIZE))


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        numbers = batch["id"] if isinstance(batch, dict) else batch[0]
        self.seen.append((self.trainer.current_epoch, numbers.tolist()))
        return self.layer(numbers[:, None].float() / SIZE).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def write_shards(folder: Path, shards: int = 4) -> None:
    wds = pytest.importorskip("webdataset")
    for shard in range(shards):
        with wds.TarWriter(str(folder / f"{shard}.tar")) as file:
            for number in ALL[shard::shards]:
                file.write({"__key__": str(number), "id.cls": number})


def tars(folder: Path, **options: Any) -> Any:
    import webdataset as wds

    shards = [str(path) for path in sorted(folder.glob("*.tar"))]
    options = {"nodesplitter": wds.split_by_node, "empty_check": False, **options}
    return wds.WebDataset(shards, **options)


def shuffled_tars(folder: Path, workers: int) -> Any:
    data = tars(folder, shardshuffle=4).shuffle(8).decode().to_tuple("id.cls")
    return DataLoader(data, 2, num_workers=workers)


def tars_by_epoch(folder: Path, workers: int) -> Any:
    import webdataset as wds

    data = tars(folder, shardshuffle=4, detshuffle=True).compose(wds.detshuffle(8))
    return DataLoader(data.decode().to_tuple("id.cls"), 2, num_workers=workers)


def rebatched_tars(folder: Path, workers: int) -> Any:
    import webdataset as wds

    data = tars(folder, shardshuffle=4).decode().to_tuple("id.cls").batched(2)
    loader = wds.WebLoader(data, batch_size=None, num_workers=workers)
    return loader.unbatched().shuffle(8).batched(2)


def tars_of_all(folder: Path, workers: int) -> Any:
    """Every process reads all tars, and the run gives each its own batches."""
    data = tars(folder, shardshuffle=4, nodesplitter=None).shuffle(8).decode().to_tuple("id.cls")
    return DataLoader(data, 2, num_workers=workers)


def table(workers: int) -> Any:
    import datasets

    data = datasets.Dataset.from_dict({"id": ALL}).with_format("torch")
    return DataLoader(data, 2, shuffle=True, num_workers=workers)


def stream(workers: int, *, split: bool) -> Any:
    import datasets
    from datasets.distributed import split_dataset_by_node

    data = datasets.Dataset.from_dict({"id": ALL}).to_iterable_dataset(num_shards=4)
    data = data.with_format("torch").shuffle(seed=0, buffer_size=8)
    if split:
        data = split_dataset_by_node(data, dist.get_rank(), dist.get_world_size())
    return DataLoader(data, 2, num_workers=workers)


def nodes(threads: int) -> Any:
    from torch.utils.data import RandomSampler, default_collate
    from torchdata import nodes as tn

    node = tn.SamplerWrapper(RandomSampler(ALL))
    node = tn.ParallelMapper(node, lambda n: {"id": n}, num_workers=threads or 1, method="thread")
    return tn.Loader(tn.Prefetcher(tn.Mapper(tn.Batcher(node, 2, False), default_collate), 2))


MAKERS = {
    "shuffled tars": shuffled_tars,
    "tars by epoch": tars_by_epoch,
    "rebatched tars": rebatched_tars,
    "tars of all": tars_of_all,
    "table": lambda folder, workers: table(workers),
    "stream": lambda folder, workers: stream(workers, split=False),
    "split stream": lambda folder, workers: stream(workers, split=True),
    "nodes": lambda folder, workers: nodes(workers),
}
OF_TARS = [name for name in MAKERS if "tars" in name]


def fit(name: str, workers: int, shards: Path, folder: Path, steps: int | None = None) -> Any:
    random.seed()  # as another start of the program
    loader = MAKERS[name](shards, workers)
    saving = ModelCheckpoint(every="1 steps")
    options: Any = {"max_epochs": 2, "max_steps": steps, "project_dir": folder}
    trainer = Trainer(cpu=True, seed=0, progress_bar=False, callbacks=saving, **options)
    module = Net()
    trainer.fit(module, loader, ckpt_path="auto")
    return module.seen


def check(run: Callable[..., list[Any]], name: str, workers: int, folder: Path) -> None:
    whole = run(fit, name, workers, folder, folder / "whole")
    orders = []
    for epoch in (0, 1):
        orders.append([chain(*(x for e, x in seen if e == epoch)) for seen in whole])
        orders[-1] = [list(order) for order in orders[-1]]
        assert sorted(chain(*orders[-1])) == ALL
    assert orders[0] != orders[1]
    parts = [[] for _ in whole]
    for steps in (3, len(whole[0]) // 2 + 2, None):  # inside the first and the second epoch
        for part, seen in zip(
            parts, run(fit, name, workers, folder, folder / "r", steps), strict=True
        ):
            part += seen
    assert parts == whole


def alone(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return [function(*arguments)]


@requires_webdataset
@pytest.mark.parametrize(
    ("name", "workers"), [*((name, 0) for name in OF_TARS), ("shuffled tars", 2)]
)
def test_tars_of_webdataset_are_read_once_and_resume_exactly(name, workers, ranks2, tmp_path):
    write_shards(tmp_path)
    check(ranks2, name, workers, tmp_path)


@requires_datasets
@pytest.mark.parametrize(("name", "workers"), [("table", 0), ("stream", 2), ("split stream", 0)])
def test_data_of_datasets_are_read_once_and_resume_exactly(name, workers, ranks2, tmp_path):
    check(ranks2, name, workers, tmp_path)


@pytest.mark.parametrize("pool", [False, True])
def test_a_loader_of_torchdata_nodes_is_read_once_and_resumes_exactly(pool, ranks2, tmp_path):
    check(ranks2 if pool else alone, "nodes", 2, tmp_path)


@requires_webdataset
def test_tars_drawn_with_replacement_are_drawn_again_on_resume(tmp_path):
    write_shards(tmp_path)

    def read(skip: int) -> list[int]:
        data = tars(tmp_path, resampled=True, nodesplitter=None, shardshuffle=False)
        loader = DataLoader(data.shuffle(8).decode().to_tuple("id.cls").with_epoch(12), 2)
        loader = Accelerator(cpu=True).prepare(loader)
        accelerated = Accelerator(cpu=True).skip_first_batches(loader, skip) if skip else loader
        return [number for (batch,) in accelerated for number in batch.tolist()]

    assert read(0)[6:] == read(3)


def parts(kind: str, rank: int) -> Any:
    """Return a process's own part of data that a `Trainer` would divide once more."""
    whole = TensorDataset(torch.tensor(ALL))
    if kind == "split_dataset_by_node":
        import datasets
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(datasets.Dataset.from_dict({"id": ALL}), rank, 2)
    if kind == "random_split":
        return random_split(whole, [20, 6], torch.Generator().manual_seed(rank))[0]
    return Subset(whole, ALL[rank::2])


@pytest.mark.parametrize(
    "kind",
    ["Subset", "random_split", pytest.param("split_dataset_by_node", marks=requires_datasets)],
)
def test_map_style_data_that_differ_between_processes_are_refused(kind, ranks2, tmp_path):
    def run() -> None:
        trainer = Trainer(cpu=True, max_epochs=1, progress_bar=False, project_dir=tmp_path)
        trainer.fit(Net(), DataLoader(parts(kind, dist.get_rank()), 2))

    with pytest.raises(RankError, match="has different samples on rank 1 than on rank 0"):
        ranks2(run)
