"""What a worker sends arrives as it is: small tensors by their bytes, others in shared memory."""

import gc
import multiprocessing
import os
import pickle
from collections import namedtuple
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from trainer.data import inline_pickling
from trainer.data.epoch_iterator import EpochIterator
from trainer.data.inline_pickling import LIMIT, pickled_inline

Pair = namedtuple("Pair", ["x", "y"])


@pytest.fixture
def there_and_back(monkeypatch):
    """Through what torch's queues do with what a worker returns."""
    monkeypatch.setattr(inline_pickling, "get_worker_info", lambda: "some")

    def travel(batch):
        return pickle.loads(ForkingPickler.dumps(pickled_inline(batch)))

    return travel


def as_it_is(batch):
    return batch


def batches(dataset, size=4, workers=1, **kwargs) -> list:
    epoch_iterator = EpochIterator(DataLoader(dataset, size, num_workers=workers, **kwargs))
    epoch_iterator.set_epoch(0)
    return [current.batch for current in epoch_iterator.global_batches()]


TENSORS = [
    torch.arange(20)[3:9:2],
    torch.tensor(3.5, dtype=torch.bfloat16),
    torch.empty(3, 0, dtype=torch.int8),
    torch.zeros(1).expand(1000, 1000),
    torch.tensor([1 + 2j, 3 - 4j]).conj(),
    torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    torch.arange(96.0).reshape(2, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.ones(2).share_memory_(),
    torch.ones(LIMIT // 4),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=range(len(TENSORS)))
def test_tensors_arrive_unchanged(there_and_back, tensor):
    found = there_and_back(tensor)
    assert (type(found), found.dtype, found.shape) == (type(tensor), tensor.dtype, tensor.shape)
    assert found.stride() == tensor.stride() or tensor.is_neg()  # a copy then
    assert found.tolist() == tensor.tolist()
    assert not found.is_shared()
    if not found.storage_offset():
        assert found.data_ptr() % 64 == 0  # some kernels add in another order elsewhere


def test_other_kinds_of_tensors_are_left_to_torch(there_and_back):
    assert there_and_back(torch.ones(2, requires_grad=True)).requires_grad
    assert there_and_back(torch.empty(2, device="meta")).is_meta
    with torch.sparse.check_sparse_tensor_invariants():
        sparse = there_and_back(torch.eye(3).to_sparse())
    assert sparse.layout is torch.sparse_coo
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    assert there_and_back(ragged).is_nested

    with torch.device("meta"):  # what new tensors are on by default
        assert there_and_back([torch.ones(2, device="cpu")])[0].tolist() == [1, 1]


def test_shared_memory_stays_shared(there_and_back):
    whole = torch.arange(6.0)
    batch = there_and_back(Pair(x=[whole, whole[2:]], y={"again": whole, "other": whole.clone()}))
    assert type(batch) is Pair
    assert batch.x[0] is batch.y["again"]
    batch.x[0][3] = 9
    assert (batch.x[1][1], batch.y["other"][3]) == (9, 3)
    assert whole[3] == 3


class Samples(Dataset):
    """Dictionaries with a number, an array and two tensors, a small and a large one."""

    large = LIMIT // 16 + 1

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {
            "number": index,
            "array": numpy.arange(index, index + 2),
            "small": torch.tensor([index]),
            "large": torch.full((self.large,), float(index)),
            "name": str(index),
        }


def test_small_tensors_are_inlined_and_large_ones_shared():
    assert all(
        repr(one) == repr(two)
        and {key: type(one[key]) for key in one} == {k: type(two[k]) for k in two}
        for one, two in zip(batches(Samples()), batches(Samples(), workers=0), strict=True)
    )
    for batch in batches(Samples()):
        shared = {key: value.is_shared() for key, value in batch.items() if key != "name"}
        assert shared == {"number": False, "array": False, "small": False, "large": True}


class Buffered(Dataset):
    """Writes each batch over the last one."""

    def __init__(self):
        self.buffer = torch.zeros(2)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index

    def __getitems__(self, indices):
        return self.buffer.copy_(torch.tensor(indices))


def test_a_buffer_that_the_dataset_overwrites():
    found = batches(Buffered(), 2, collate_fn=as_it_is, prefetch_factor=10)
    assert torch.stack(found).flatten().tolist() == list(range(40))


class Unfit(Samples):
    def __getitem__(self, index):
        return lambda: index


def test_a_batch_that_cannot_be_pickled_raises():
    """With a plain loader one waits for it for ever."""
    with pytest.raises(Exception, match=r"worker process 0[^$]*local object"):
        batches(Unfit(), collate_fn=as_it_is)


class Broken(Samples):
    fails = True

    def __getitem__(self, index):
        if self.fails:
            raise LookupError(index)
        return index


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_with_an_error_and_are_replaced(persistent):
    epoch_iterator = EpochIterator(
        DataLoader(data := Broken(), 4, num_workers=1, persistent_workers=persistent)
    )
    epoch_iterator.set_epoch(0)
    with pytest.raises(LookupError):
        list(epoch_iterator.global_batches())
    assert multiprocessing.active_children() == []
    data.fails = False
    assert [current.batch.tolist() for current in epoch_iterator.global_batches()] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    epoch_iterator.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_kept_batches_hold_no_file_descriptors():
    before = len(os.listdir("/proc/self/fd"))
    kept = batches(Buffered(), 2, collate_fn=as_it_is)
    assert len(kept) == 20
    assert len(os.listdir("/proc/self/fd")) - before < 10


class Frozen(Samples):
    def __getitem__(self, index):
        return gc.get_freeze_count()


def test_workers_freeze_the_objects_of_the_main_process():
    before = gc.get_freeze_count()
    (found,) = batches(Frozen(), 1, collate_fn=as_it_is)[:1]
    assert min(found) > 1000
    assert gc.get_freeze_count() == before


class Collecting:
    """Counts the collections in a worker before what it has brought along is frozen."""

    def __init__(self):
        self.of = []
        self.found = None

    def __call__(self, phase, info):
        if not gc.get_freeze_count():
            self.of.append(os.getpid())

    def begin(self, worker_id):
        self.found = self.of.count(os.getpid()), gc.isenabled()
        gc.set_threshold(1000)  # else it collects at each step of its way out, for seconds


@pytest.mark.parametrize("collects", [True, False])
def test_a_worker_collects_no_garbage_of_its_parent(collects):
    """A process group among it would wait for threads that are not in the worker."""
    collecting = Collecting()

    class Found(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return torch.tensor(collecting.found)

    loader = DataLoader(Found(), num_workers=1, worker_init_fn=collecting.begin)
    threshold = gc.get_threshold()
    gc.unfreeze()  # as in a user's process
    gc.callbacks.append(collecting)
    gc.set_threshold(10)  # at 1 a busy machine takes minutes
    try:
        if not collects:
            gc.disable()
        ((found,),) = [round_.batch.tolist() for round_ in EpochIterator(loader).read()]
        assert gc.isenabled() == collects
    finally:
        gc.enable()
        gc.set_threshold(*threshold)
        gc.callbacks.remove(collecting)
        gc.freeze()
    assert found == [0, collects]
