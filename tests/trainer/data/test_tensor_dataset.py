"""A TensorDataset, or a Subset of one, gives its batches at once, as if collated."""

import copy
import pickle

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)

from trainer.data.epoch_iterator import EpochIterator
from trainer.data.sampler import BatchIndices
from trainer.data.tensor_dataset import TensorRows

DATA = TensorDataset(
    torch.arange(24.0).reshape(12, 2),
    torch.arange(12),
    torch.arange(12) % 2 == 0,
    torch.rand(12, 3, 1, 2, generator=torch.Generator().manual_seed(0)).bfloat16(),
    torch.arange(12).to(torch.complex64),
    torch.empty(12, 0, dtype=torch.uint8),
)


class Slow(Dataset):
    """The same samples, one after the other."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]


def batches(loader, epoch=1, **kwargs):
    epoch_iterator = EpochIterator(loader, seed=3, **kwargs)
    epoch_iterator.set_epoch(epoch)
    return [(each.batch, each.samples) for each in epoch_iterator.global_batches() if each.present]


def assert_same(found, expected):
    assert len(found) == len(expected) > 0
    for (batch, samples), (other, others_samples) in zip(found, expected, strict=True):
        assert (type(batch), samples) == (type(other), others_samples)
        for one, two in zip(batch, other, strict=True):
            assert (one.dtype, one.shape, one.stride()) == (two.dtype, two.shape, two.stride())
            assert torch.equal(one, two)


def count_single_reads(monkeypatch):
    """Return the list of the samples that are taken one by one from now on."""
    taken = []
    original = TensorDataset.__getitem__
    monkeypatch.setattr(
        TensorDataset, "__getitem__", lambda self, i: (taken.append(i), original(self, i))[1]
    )
    return taken


NESTED = Subset(Subset(DATA, [5, 1, 8, 3, 3, 11, 0]), range(6, 0, -1))


@pytest.mark.parametrize("dataset", [DATA, NESTED, random_split(DATA, [7, 5])[1]])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 5},
        {"batch_size": 5, "shuffle": True, "num_workers": 1},
        {"batch_size": 2, "drop_last": True, "shuffle": True},
        {"batch_sampler": [[1, 0], [4], [2, 2, 3]]},
    ],
)
def test_batches_equal_collated_samples(monkeypatch, dataset, options):
    expected = batches(DataLoader(Slow(dataset), **options))
    taken = count_single_reads(monkeypatch)
    assert_same(batches(DataLoader(dataset, **options)), expected)
    assert taken == []


def test_a_batch_is_a_copy():
    data = TensorDataset(torch.zeros(4, 1))
    ((batch, _),) = batches(DataLoader(data, 4))
    batch[0] += 1
    assert data.tensors[0].sum() == 0


@pytest.mark.parametrize("sampler", [[[0, -1]], [[torch.tensor(2), 1]]])
def test_negative_and_tensor_indices(sampler):
    expected = batches(DataLoader(Slow(DATA), batch_sampler=sampler))
    assert_same(batches(DataLoader(DATA, batch_sampler=sampler)), expected)


def test_an_index_out_of_bounds_raises():
    with pytest.raises(IndexError, match="index 12 is out of bounds"):
        batches(DataLoader(DATA, batch_sampler=[[0, 12]]))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(4, 3).t()[:3],
        torch.rand(4, 2, 3, 3).to(memory_format=torch.channels_last),
        torch.rand(4, 2, requires_grad=True),
        torch.nn.Parameter(torch.rand(4)),
        torch.rand(1, 3).expand(4, 3),
    ],
)
def test_unusual_tensors_are_stacked(monkeypatch, tensor):
    dataset = TensorDataset(tensor)
    expected = batches(DataLoader(Slow(dataset), 2))
    taken = count_single_reads(monkeypatch)
    found = batches(DataLoader(dataset, 2))
    assert_same(found, expected)
    assert [each[0].requires_grad for each, _ in found] == [
        each[0].requires_grad for each, _ in expected
    ]
    assert taken == list(range(len(dataset)))


def read(rows, *indices):
    """The batch of these indices."""
    placed = BatchIndices(indices)
    placed.seed_key = 3, 0, 0
    return rows.__getitems__(placed)


def test_dtypes_that_torch_cannot_index_are_stacked():
    values = torch.arange(4).to(torch.uint16)
    rows = TensorRows(TensorDataset(values), default_collate)
    assert read(rows, 1, 3)[0].tolist() == [1, 3]


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * tensor for tensor in super().__getitem__(index))


def test_a_subclass_is_read_sample_by_sample():
    found = batches(DataLoader(Doubled(torch.arange(4)), 4))
    assert found[0][0][0].tolist() == [0, 2, 4, 6]
    found = batches(DataLoader(Subset(Doubled(torch.arange(4)), [3, 1]), 4))
    assert found[0][0][0].tolist() == [6, 2]


def test_a_collate_fn_is_used():
    dataset = TensorDataset(torch.arange(4))
    assert batches(DataLoader(dataset, 2, collate_fn=len)) == [(2, 2), (2, 2)]


def test_tensors_may_be_replaced_between_batches(monkeypatch):
    rows = TensorRows(dataset := TensorDataset(torch.arange(4)), default_collate)
    assert read(rows, 1, 2)[0].tolist() == [1, 2]
    dataset.tensors = (torch.rand(4, 2, 3, 3).to(memory_format=torch.channels_last),)
    (expected,) = default_collate([dataset[1], dataset[0]])
    taken = count_single_reads(monkeypatch)
    (found,) = read(rows, 1, 0)
    assert torch.equal(found, expected)
    assert taken == [1, 0]


def test_other_attributes_are_those_of_the_dataset():
    rows = TensorRows(DATA, default_collate)
    assert rows.tensors is DATA.tensors
    for twin in (copy.copy(rows), pickle.loads(pickle.dumps(rows))):
        assert torch.equal(read(twin, 2, 1)[1], torch.tensor([2, 1]))
    with pytest.raises(AttributeError, match="'TensorDataset' object has no attribute 'nothing'"):
        rows.nothing


class Ending(Dataset):
    """Ends the epoch as iterators do, which torch's loader takes for its end."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 4:
            raise StopIteration
        return index


@pytest.mark.parametrize("size", [2, None])
def test_stop_iteration_in_a_dataset_ends_the_epoch_with_a_warning(size, caplog):
    loader = DataLoader(Ending(), size)
    read, total = (2, 3) if size else (4, 6)
    assert len(batches(loader)) == len(list(loader)) == read
    (logged,) = caplog.messages
    assert logged.startswith(
        f"The dataset (Ending) raised StopIteration in epoch 2 after {read} of {total} batches"
    )
