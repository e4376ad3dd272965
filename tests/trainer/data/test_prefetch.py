"""Batches that go to the device by a stream of their own, and when they may be used."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.helpers.device import DEVICE, counted_waits
from tests.helpers.requires import requires_cuda
from tests.helpers.streams import LateStreams
from trainer import TrainModule
from trainer.data import dataloader as loaders
from trainer.data.dataloader import DataLoaderShard, LoaderSettings
from trainer.data.dispatcher import DataLoaderDispatcher
from trainer.data.epoch_iterator import EpochIterator
from trainer.data.prefetch import RunAheadLimit, send, streams_for
from trainer.data.sampler import DataShard
from trainer.loops import device_transfer as moving
from trainer.tree import to_device

META = torch.device("meta")
Pair = namedtuple("Pair", "x y")


@dataclass
class Fields:
    x: Any
    name: str


class Encoding(UserDict):
    """Moves itself, as the batches of tokenizers do."""

    def to(self, device, non_blocking=False):
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Graph:
    """Moves itself, and says how its memory is kept."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Graph(self.x.to(device))

    def record_stream(self, stream):
        raise NotImplementedError  # the streams decide


class Opaque:
    """Moves itself, and shows nothing."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Opaque(self.x.to(device))


class Wrapper(torch.Tensor):
    """On the host as far as it says, and something else inside."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (3,))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def x(*size):
    return torch.ones(*(size or (3,)))


def packed():
    return pack_sequence([x(3), x(2)])


ON_SIDE_STREAM = {
    "tensor": (x, 1),
    "nested": (lambda: {"a": [x(), (x(), 3)], "b": "text", "c": None, "d": torch.Tensor}, 2),
    "named tuple": (lambda: Pair(x(), x()), 2),
    "dataclass": (lambda: Fields(x(), "name"), 1),
    "packed sequence": (packed, 1),
    "record_stream": (lambda: [Graph(x()), x()], 2),
    "encoding": (lambda: [Encoding(ids=x()), {"labels": x()}], 2),
}
ON_COMPUTING_STREAM = {
    "object with to": lambda: [x(), {"a": Opaque(x())}],
    "encoding of such objects": lambda: Encoding(ids=Opaque(x())),
    "tensor on a device": lambda: [x(), x().to(META)],
    "leaf of a graph": lambda: x().requires_grad_(),
    "sparse tensor": lambda: torch.eye(3).to_sparse(),
    "nested tensor": lambda: torch.nested.nested_tensor([x(2), x(3)], layout=torch.jagged),
    "tensor subclass": Wrapper,
}


def types_of(tree):
    if isinstance(tree, torch.Tensor):
        return tree.device.type, tuple(tree.shape)
    if isinstance(tree, (dict, UserDict)):
        return type(tree), {key: types_of(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree), [types_of(value) for value in tree]
    if isinstance(tree, (Fields, Graph, Opaque)):
        return type(tree), types_of(tree.x)
    return tree


@pytest.mark.parametrize("kind", ON_SIDE_STREAM)
def test_batches_are_copied_on_a_side_stream(kind):
    make, held = ON_SIDE_STREAM[kind]
    streams = LateStreams()
    flight = send(make(), lambda batch: to_device(batch, META, non_blocking=True), streams)
    assert streams.log == [("event", 0, "side")]
    batch = flight.arrive()
    kept = [("keep", "computing")] * held
    assert streams.log == [("event", 0, "side"), ("wait", 0, "computing"), *kept]
    assert types_of(batch) == types_of(to_device(make(), META))
    tensors = [each for each in streams.kept if isinstance(each, torch.Tensor)]
    assert len({id(each) for each in streams.kept}) == held
    assert all(tensor.device == META for tensor in tensors)
    assert len(tensors) == held - (kind == "record_stream")


@pytest.mark.parametrize("kind", ON_COMPUTING_STREAM)
def test_tensors_whose_memory_cannot_be_kept_are_copied_on_the_computing_stream(kind):
    streams = LateStreams()
    batch = ON_COMPUTING_STREAM[kind]()
    flight = send(batch, lambda each: (each, streams.current().name), streams)
    assert flight.arrive()[0] is batch
    assert flight.arrive()[1] == "computing"
    assert streams.log == []


def test_a_transfer_that_computes_waits_for_the_computing_stream():
    streams = LateStreams()
    found = []
    send(
        x(), lambda each: found.append((streams.current().name, *streams.log)), streams, follow=True
    )
    assert found == [("side", ("follow", "computing", "side"))]
    assert streams.log == [("follow", "computing", "side"), ("event", 0, "side")]


def test_a_failed_copy_restores_the_current_stream():
    streams = LateStreams()
    with pytest.raises(ZeroDivisionError):
        send(x(), lambda _: 1 / 0, streams)
    assert streams.current().name == "computing"


# -- prepared loaders --------------------------------------------------------------------------


class Stream(IterableDataset):
    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(self.values)


class Failing(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 4:
            raise OSError("no such sample")
        return torch.tensor([float(index)])


def prepared(kind, source, *, non_blocking=True, skip=0, rank=0, world_size=1):
    settings = LoaderSettings(
        rank=rank,
        world_size=world_size,
        seed=0,
        even_batches=False,
        device=DEVICE,
        non_blocking=non_blocking,
        skip_batches=skip,
    )
    return kind.of(source, settings)


@pytest.fixture
def streams(monkeypatch):
    streams = LateStreams()
    monkeypatch.setattr(loaders, "streams_for", streams.copying)
    with counted_waits(monkeypatch):
        yield streams


def values(loader, streams):
    found = []
    for batch in loader:
        streams.note("use")
        found.append(batch[0].host.tolist() if isinstance(batch, list) else batch.host.tolist())
    return found


VALUES = torch.arange(7.0)
SOURCES = [
    (DataLoaderShard, DataLoader(TensorDataset(VALUES), 2)),
    (DataLoaderShard, DataLoader(Stream(VALUES), 2)),
    (DataLoaderDispatcher, DataLoader(TensorDataset(VALUES), 2)),
    (DataLoaderDispatcher, DataLoader(Stream(VALUES), 2)),
]


@pytest.mark.parametrize(("kind", "source"), SOURCES)
@pytest.mark.parametrize("skip", [0, 1])
def test_a_prepared_loader_copies_one_batch_ahead(streams, kind, source, skip):
    found = values(prepared(kind, source, skip=skip), streams)
    assert found == [[0, 1], [2, 3], [4, 5], [6]][skip:]
    last = len(found) - 1
    expected = [("event", 0, "side")]
    for number in range(len(found)):
        expected += [] if number == last else [("event", number + 1, "side")]
        expected += [("wait", number, "computing"), ("keep", "computing"), ("use",)]
    assert streams.log == expected


@pytest.mark.parametrize(("kind", "source"), SOURCES)
def test_without_non_blocking_the_computing_stream_copies(streams, kind, source):
    found = values(prepared(kind, source, non_blocking=False), streams)
    assert found == [[0, 1], [2, 3], [4, 5], [6]]
    assert streams.log == [("use",)] * 4


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
def test_an_error_comes_after_the_batches_before_it(streams, kind):
    found = []
    batches = iter(prepared(kind, DataLoader(Failing(), 2)))
    with pytest.raises(OSError, match="no such sample"):
        found.extend(batch.host.flatten().tolist() for batch in batches)
    assert found == [[0, 1], [2, 3]]


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
def test_a_pass_after_one_that_was_left(streams, kind):
    loader = prepared(kind, DataLoader(TensorDataset(VALUES), 2))
    for _ in loader:
        break
    assert values(loader, streams) == [[0, 1], [2, 3], [4, 5], [6]]


def test_a_rank_without_a_batch_copies_nothing(streams):
    epoch_iterator = EpochIterator(
        DataLoader(TensorDataset(VALUES), 3), DataShard(rank=1, world_size=2)
    )
    device_transfer = moving.DeviceTransfer(
        TrainModule(), None, device=DEVICE, rank=1, world_size=2
    )
    device_transfer._streams = streams
    global_batches = list(device_transfer.global_batches(epoch_iterator, counted=False))
    assert [each.present for each in global_batches] == [True, False]
    assert global_batches[0].batch[0].host.tolist() == [3, 4, 5]
    assert global_batches[1].batch[0].host.tolist() == [3, 4, 5]  # its latest, as a dummy batch
    shard = prepared(DataLoaderShard, DataLoader(TensorDataset(VALUES), 3), rank=1, world_size=2)
    assert values(shard, streams) == [[3, 4, 5]]


# -- on a device -------------------------------------------------------------------------------


@requires_cuda
def test_copied_memory_is_kept_until_it_was_used():
    device = torch.device("cuda", torch.cuda.current_device())
    streams = streams_for(device)
    assert streams is streams_for(torch.device(device))
    assert streams.current().stream_id == torch.cuda.current_stream().stream_id
    assert streams.side.stream_id != streams.current().stream_id
    host = torch.arange(1 << 22, dtype=torch.float32).pin_memory()
    host.to(device).double().sum()  # loads the kernels, which may take longer than the pause below
    sent_in = []

    def move(batch):
        sent_in.append(streams.current())
        return to_device(batch, device, non_blocking=True)

    flight = send([host], move, streams)
    assert sent_in == [streams.side]
    torch.cuda._sleep(10**9)  # the stream that computes is busy, and the other one is not
    flight.event.synchronize()
    assert not torch.cuda.current_stream().query()
    (batch,) = flight.arrive()
    total = batch.double().sum()
    place = batch.data_ptr()
    del batch, flight
    again = send([host * 0], move, streams)
    assert again.value[0].data_ptr() != place  # its memory is still to be read
    assert float(total) == float(host.double().sum())


def test_lead_limits_how_far_the_host_runs_ahead():
    waited = []

    class Event:
        def __init__(self, number):
            self.number = number

        def synchronize(self):
            waited.append(self.number)

    lead = RunAheadLimit(2)
    for number in range(5):
        lead.add(Event(number))
    assert waited == [0, 1, 2]
