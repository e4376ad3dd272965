"""What metrics are computed from: every sample once, on any number of processes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from tests.helpers.datasets import Stream
from tests.helpers.ranks import RankError
from trainer.data.prepare import prepare_data_loader
from trainer.distributed.metrics import gather_for_metrics
from trainer.state import GradientState


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Output:
    scores: Any
    names: Any


class Loader:
    """A prepared loader as far as `gather_for_metrics` knows it: all processes' batches are given.

    Args:
        rounds: Per round the batch of each process.
        remainder: Real samples in the last round.
    """

    def __init__(self, rounds: list[Any], remainder: int) -> None:
        self.rounds, self.last_remainder = rounds, remainder
        self.end_of_dataloader, self.remainder = False, -1

    def __iter__(self):
        state = GradientState()
        state._add_dataloader(self)
        try:
            for number, batches in enumerate(self.rounds, start=1):
                if number == len(self.rounds):
                    self.end_of_dataloader, self.remainder = True, self.last_remainder
                yield batches[dist.get_rank()]
        finally:
            state._remove_dataloader(self)


def loader(source: Any, batch_size: int, **settings: Any) -> Any:
    plain = DataLoader(source, batch_size=batch_size)
    return prepare_data_loader(plain, put_on_device=True, **settings)


# -- the whole


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_sample_is_gathered_once_and_in_order(ranks, size):
    modes: list[Any] = [({}, range, (1, 2, 3, 4)), ({"split_batches": True}, range, (2,))]
    modes += [({"dispatch_batches": True}, kind, (2,)) for kind in (range, Stream)]
    modes.append(({"dispatch_batches": True, "split_batches": True}, Stream, (2,)))

    def evaluate(modes: list[Any]) -> list[Any]:
        wrong = []
        for (mode, kind, batch_sizes), samples in product(modes, (1, 2, 3, 5, 8, 12, 13)):
            for batch_size in batch_sizes:
                split = dist.get_world_size() if "split_batches" in mode else 1
                found: list[int] = []
                names: list[str] = []
                for batch in loader(kind(samples), batch_size * split, **mode):
                    output = Output(batch, [f"{each}" for each in batch.tolist()])
                    output = gather_for_metrics(output)
                    found += output.scores.tolist()
                    names += output.names
                expected = list(range(samples))
                if found != expected or names != [f"{each}" for each in expected]:
                    wrong.append((mode, kind, samples, batch_size, found, names))
        return wrong

    assert ranks(size)(evaluate, modes) == [[]] * size


class Ready(Dataset):
    """Ready-made batches of these sizes, of the numbers from 0 on."""

    def __init__(self, sizes: list[int]) -> None:
        self.ready = torch.arange(sum(sizes)).split(sizes)

    def __len__(self) -> int:
        return len(self.ready)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self.ready[number]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_repeated_batches_of_a_loader_without_a_batch_size_count_once(ranks, size):
    def evaluate() -> list[Any]:
        wrong = []
        for sizes in ([4, 4, 2], [3, 3, 3, 2], [1, 3, 2, 4, 1], [5], [2, 2, 2, 2], [2, 1, 3]):
            found: list[Any] = []
            names: list[str] = []
            means = 0
            rest: list[int] = []
            ready = prepare_data_loader(DataLoader(Ready(sizes), batch_size=None))
            for batch in ready:
                entries = {"x": batch, "names": [f"{each}" for each in batch.tolist()]}
                entries = gather_for_metrics(entries)
                found += entries["x"].tolist()
                names += entries["names"]
                rest += gather_for_metrics(batch, use_gather_object=True)
                means += gather_for_metrics(batch.float().mean()).numel()
            whole = list(range(sum(sizes)))
            world = dist.get_world_size()
            rounds = -(-len(sizes) // world)
            right = [whole, [f"{each}" for each in whole], whole, rounds * world]
            if [found, names, rest, means] != right:
                wrong.append((sizes, found, names, rest, means))
        return wrong

    assert ranks(size)(evaluate) == [[]] * size


@pytest.mark.parametrize("size", [2, 3])
def test_even_batches_false_loses_nothing(ranks, size):
    def evaluate() -> list[Any]:
        wrong, rounds = [], 0
        for samples, batch_size in product(range(1, 14), range(1, 5)):
            world = dist.get_world_size()
            if -(-samples // batch_size) % world:
                continue  # some process has no last batch, and does not come to the gathering
            found: list[int] = []
            for batch in loader(range(samples), batch_size, even_batches=False):
                found += gather_for_metrics(batch).tolist()
                rounds += 1
            if found != list(range(samples)):
                wrong.append((samples, batch_size, found))
        return [wrong, rounds > 10]

    assert ranks(size)(evaluate) == [[[], True]] * size


# -- which part is cut, by loaders whose batches are given here


ROUNDS = [
    [torch.tensor([0, 1]), torch.tensor([2, 3])],
    [torch.tensor([4, 0]), torch.tensor([1, 2])],
]


@pytest.mark.parametrize(
    ("remainder", "last"),
    [(1, [4]), (3, [4, 0, 1]), (4, [4, 0, 1, 2]), (0, [4, 0, 1, 2]), (-1, [4, 0, 1, 2])],
)
def test_the_last_batch_is_cut_to_the_remainder(ranks2, remainder, last):
    def evaluate() -> list[Any]:
        found = [gather_for_metrics(batch).tolist() for batch in Loader(ROUNDS, remainder)]
        outside = gather_for_metrics(torch.tensor([dist.get_rank()] * 2)).tolist()
        return [*found, outside]

    assert ranks2(evaluate) == [[[0, 1, 2, 3], last, [0, 0, 1, 1]]] * 2


def test_an_unknown_remainder_is_logged(ranks2):
    def evaluate() -> list[str]:
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logger = logging.getLogger("trainer.distributed.metrics")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        for batch in Loader(ROUNDS, -1):
            gather_for_metrics(batch)
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        return messages

    for messages in ranks2(evaluate):
        assert len(messages) == 1
        assert "at the end of the loader is unknown" in messages[0]


def test_the_inner_loader_of_nested_loops_counts(ranks2):
    def evaluate() -> list[Any]:
        found = []
        for outer in Loader(ROUNDS, 3):
            for inner in Loader(ROUNDS[1:], 1):
                found.append(gather_for_metrics(inner).tolist())
                break  # a loop that is left lets the outer loader count again
            found.append(gather_for_metrics(outer).tolist())
        return found

    assert ranks2(evaluate) == [[[4], [0, 1, 2, 3], [4], [4, 0, 1]]] * 2


def test_scalars_are_not_cut(ranks2):
    def evaluate() -> list[Any]:
        rank = dist.get_rank()
        found: list[Any] = []
        for batch in Loader(ROUNDS[1:], 1):
            both = gather_for_metrics([torch.tensor(rank), batch])
            found += [each.tolist() for each in both]
            found += [gather_for_metrics(0.5 + rank), gather_for_metrics("ab")]
        return found

    assert ranks2(evaluate) == [[[0, 1], [4], [0.5, 1.5], ["ab", "ab"]]] * 2


def test_sizes_may_differ_between_ranks(ranks3):
    def evaluate() -> list[Any]:
        rank = dist.get_rank()
        rows = torch.full((rank, 2), rank, dtype=torch.int16)
        found = gather_for_metrics(
            Pair(rows, {"n": torch.full((2 - rank,), rank), "s": rows.sum()})
        )
        return [found.left.tolist(), found.right["n"].tolist(), found.right["s"].tolist()]

    expected = [[[1, 1], [2, 2], [2, 2]], [0, 0, 1], [0, 2, 8]]
    assert ranks3(evaluate) == [expected] * 3


# -- objects


def test_an_empty_list_on_one_rank(ranks2):
    def evaluate() -> Any:
        return gather_for_metrics(["a"] if dist.get_rank() else [])

    assert ranks2(evaluate) == [["a"]] * 2


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (torch.ones(2, 3), torch.ones(2, 4), r"gather along dimension 0 \(float32\[\*, 4\]\)"),
        (torch.ones(2), ["a", "b"], "gather_object"),
        ({"a": ["x"]}, {"b": ["x"]}, r"gather_for_metrics \(dict of 'b'\)"),
    ],
)
def test_mismatched_structures_raise_on_all(ranks2, first, second, text):
    def evaluate(*both: Any) -> None:
        gather_for_metrics(both[dist.get_rank()])

    with pytest.raises(RankError, match=rf"rank 1: {text}") as found:
        ranks2(evaluate, first, second)
    assert found.value.failures.keys() == {0, 1}


def test_gather_for_metrics_on_one_process():
    tensors = {"a": torch.ones(2), "b": [torch.tensor(1.0)]}
    assert gather_for_metrics(tensors) is tensors
    assert gather_for_metrics(["a", "b"]) == ["a", "b"]
    assert gather_for_metrics({"a": ("x", "y"), "b": 3}) == {"a": ["x", "y"], "b": [3]}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_loss_repeated_for_each_sample_is_cut_as_the_samples(ranks, size):
    def evaluate() -> list[int]:
        counts = [0, 0]
        for batch in loader(range(45), 8):
            counts[0] += len(gather_for_metrics(batch.float().mean().repeat(8)))
            counts[1] += len(gather_for_metrics(["a loss"] * 8))
        return counts

    assert ranks(size)(evaluate) == [[45, 45]] * size


# -- structures

Structure = Callable[[list[int]], Any]

COLUMNS: dict[str, Structure] = {  # what a metric may need of some samples
    "text": lambda own: (texts(own), [f"reference {each}" for each in own]),
    "text in a dict": lambda own: {"deep": (texts(own), torch.tensor(own))},
    "token lists": lambda own: [[each] * (each % 3) for each in own],
    "arrays": lambda own: (numpy.array(own), numpy.array([[each] for each in own])),
    "boxes": lambda own: [boxes(each) for each in own],
    "boxes and labels": lambda own: [tuple(boxes(each).values()) for each in own],
    "boxes and names": lambda own: ([boxes(each) for each in own], texts(own)),
    "equal boxes": lambda own: [{"boxes": torch.full((7, 4), each)} for each in own],
    "layers": lambda own: tuple((torch.tensor(own), torch.tensor(own) + i) for i in range(4)),
    "outputs of layers": lambda own: [{"x": torch.tensor(own)}, {"x": torch.tensor(own) + 1}],
}

OBJECTS: dict[str, Structure] = {
    "boxes": lambda own: [boxes(each)["boxes"] for each in own],
    "boxes and names": lambda own: ([boxes(each)["boxes"] for each in own], texts(own)),
    "two tensors": lambda own: (torch.tensor([own] * 2).T, torch.tensor(own)),
    "text": lambda own: (texts(own), texts(own)),
}


def texts(samples: list[int]) -> list[str]:
    return [f"prediction {each}" for each in samples]


def boxes(sample: int) -> dict[str, torch.Tensor]:
    return {"boxes": torch.full((sample % 3, 4), sample), "label": torch.tensor([sample])}


def plain(thing: Any) -> Any:
    """As nested lists and dicts."""
    if isinstance(thing, (torch.Tensor, numpy.ndarray)):
        return thing.tolist()
    if isinstance(thing, dict):
        return {key: plain(value) for key, value in thing.items()}
    return [plain(each) for each in thing] if isinstance(thing, (list, tuple)) else thing


def join(first: Any, second: Any, whole: Any) -> Any:
    """Join two results of the structure of `whole`, whose outer containers hold columns."""
    if isinstance(whole, dict):
        return {key: join(first[key], second[key], whole[key]) for key in whole}
    if len(whole) == 9:  # a column
        return first + second
    return [join(*each) for each in zip(first, second, whole, strict=True)]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "as_objects"), [*product(COLUMNS, [False]), *product(OBJECTS, [True])]
)
def test_any_structure_is_gathered_as_on_one_process(ranks, size, name, as_objects):
    def evaluate(name: str, as_objects: bool) -> Any:
        structure = (OBJECTS if as_objects else COLUMNS)[name]
        whole = plain(structure(list(range(9))))
        found = None
        for batch in loader(range(9), 4):
            got = plain(gather_for_metrics(structure(batch.tolist()), as_objects))
            found = got if found is None else join(found, got, whole)
        return found == whole or found

    assert ranks(size)(evaluate, name, as_objects) == [True] * size


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("rows", [[3, 5, 3, 5], [7, 7, 7, 7]])
def test_a_list_of_tensors_that_may_be_samples_raises(ranks2, kind, rows):
    def evaluate() -> Any:
        for _ in loader(range(9), 4):
            gather_for_metrics(kind(torch.zeros(each) for each in rows))

    text = "of 4 entries with tensors whose first dimensions are .* pass use_gather_object=True"
    with pytest.raises(RankError, match=f"ValueError: gather_for_metrics got a .* {text}") as found:
        ranks2(evaluate)
    assert found.value.failures.keys() == {0, 1}


@pytest.mark.parametrize("shape", [(), (1,), (1, 5)])
def test_as_many_single_values_as_samples_raise(ranks2, shape):
    def evaluate() -> Any:
        for _ in loader(range(9), 4):
            gather_for_metrics([torch.zeros(shape)] * 4)

    with pytest.raises(RankError, match=r"ValueError: .* pass use_gather_object=True"):
        ranks2(evaluate)


def test_a_column_of_another_length_raises(ranks2):
    def evaluate() -> list[int]:
        found: list[int] = []
        for batch in loader(range(9), 4):
            found.append(len(gather_for_metrics(batch.float().mean().reshape(1))))
            found.append(len(gather_for_metrics(batch.repeat_interleave(3))))
        return found

    text = "got 12 entries for the loader's last batch, which has 4 samples.*use_gather_object=True"
    with pytest.raises(RankError, match=f"ValueError: gather_for_metrics {text}") as found:
        ranks2(evaluate)
    assert found.value.failures.keys() == {0, 1}


# -- behind the loop


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("mode", [{}, {"dispatch_batches": True}])
def test_a_batch_kept_after_its_loop_is_cut_until_another_loader_is_read(ranks, size, mode):
    def evaluate(mode: dict[str, bool]) -> list[Any]:
        nine, many = loader(range(9), 9, **mode), loader(range(99), 3, **mode)
        found = []
        for _ in range(2):
            batch = next(iter(nine))
            found.append(gather_for_metrics(batch).tolist())
            found.append(gather_for_metrics([str(each) for each in batch.tolist()]))
        assert not GradientState().in_dataloader
        for _ in many:
            found.append(len(gather_for_metrics(torch.zeros(9))))
            break
        found.append(len(gather_for_metrics(torch.zeros(9))))  # what was left was not the end
        return found

    expected = [list(range(9)), list("012345678")] * 2 + [9 * size] * 2
    assert ranks(size)(evaluate, mode) == [expected] * size


def test_batches_collected_before_a_break_are_not_cut(ranks2):
    def evaluate() -> list[int]:
        found, collected = [], []
        numbers = loader(range(9), 2)
        for number, batch in enumerate(numbers, 1):
            collected.append(batch)
            if number == len(numbers):
                break
        found.append(len(gather_for_metrics(torch.cat(collected))))
        found.append(len(gather_for_metrics([0] * 6)))
        found.append(len(gather_for_metrics(list(numbers)[-1])))  # the loop has ended
        sizeless = prepare_data_loader(DataLoader(range(4), batch_sampler=[[0], [1], [2]]))
        next(iter(sizeless))
        for _ in sizeless:
            if sizeless.end_of_dataloader:
                break
        found.append(len(gather_for_metrics(torch.zeros(2))))  # nothing tells one batch from two
        return found

    assert ranks2(evaluate) == [[12, 12, 4, 4]] * 2
