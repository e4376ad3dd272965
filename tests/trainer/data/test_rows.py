"""Datasets whose samples are rows of tensors give their batches at once, as if collated."""

import collections
import copy
import functools
import pickle
import random
import sys
import types

import numpy
import pytest
import torch
from torch.utils._pytree import tree_flatten
from torch.utils.data import (
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from trainer.data.feed import Feed
from trainer.data.rows import TensorRows
from trainer.data.sampling import BatchIndices
from trainer.data.seeding import SeededDataset

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
    feed = Feed(loader, seed=3, **kwargs)
    feed.set_epoch(epoch)
    return [(each.batch, each.samples) for each in feed.rounds() if each.present]


def assert_same(found, expected):
    assert len(found) == len(expected) > 0
    for (batch, samples), (other, others_samples) in zip(found, expected, strict=True):
        assert (type(batch), samples) == (type(other), others_samples)
        for one, two in zip(batch, other, strict=True):
            assert (one.dtype, one.shape, one.stride()) == (two.dtype, two.shape, two.stride())
            assert torch.equal(one, two)


def counted(monkeypatch):
    """The samples that are taken one by one from now on."""
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
        {"batch_size": 5, "shuffle": True},
        {"batch_size": 2, "drop_last": True, "shuffle": True},
        {"batch_sampler": [[1, 0], [4], [2, 2, 3]]},
    ],
)
def test_batches_are_those_that_are_collated(monkeypatch, dataset, options):
    expected = batches(DataLoader(Slow(dataset), **options))
    taken = counted(monkeypatch)
    assert_same(batches(DataLoader(dataset, **options)), expected)
    assert taken == []


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_get_their_own(rank):
    options = {"rank": rank, "world_size": 2}
    found = batches(DataLoader(DATA, 5, shuffle=True), **options)
    assert_same(found, batches(DataLoader(Slow(DATA), 5, shuffle=True), **options))


def test_workers_take_them_at_once_too():
    loaders = [DataLoader(data, 5, shuffle=True, num_workers=1) for data in (DATA, Slow(DATA))]
    assert_same(*map(batches, loaders))


def test_a_batch_is_a_copy():
    data = TensorDataset(torch.zeros(4, 1))
    ((batch, _),) = batches(DataLoader(data, 4))
    batch[0] += 1
    assert data.tensors[0].sum() == 0


@pytest.mark.parametrize("sampler", [[[0, -1]], [[torch.tensor(2), 1]], [[True, True]]])
def test_other_indices_are_taken_one_by_one(sampler):
    expected = batches(DataLoader(Slow(DATA), batch_sampler=sampler))
    assert_same(batches(DataLoader(DATA, batch_sampler=sampler)), expected)


def test_an_index_outside_is_an_error():
    with pytest.raises(IndexError, match="index 12 is out of bounds"):
        batches(DataLoader(DATA, batch_sampler=[[0, 12]]))
    with pytest.raises(ValueError, match="Overflow"):
        batches(DataLoader(DATA, batch_sampler=[[0, 2**63]]))
    with pytest.raises(IndexError):
        batches(DataLoader(DATA, batch_sampler=[[0, -13]]))


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
def test_unusual_tensors_are_stacked_as_ever(monkeypatch, tensor):
    dataset = TensorDataset(tensor)
    expected = batches(DataLoader(Slow(dataset), 2))
    taken = counted(monkeypatch)
    found = batches(DataLoader(dataset, 2))
    assert_same(found, expected)
    assert [each[0].requires_grad for each, _ in found] == [
        each[0].requires_grad for each, _ in expected
    ]
    assert taken == list(range(len(dataset)))


class Held(Dataset):
    """Holds tensors and arrays in its attributes, of which subclasses return rows."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __len__(self):
        return 12


class Pair(Held):
    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Nested(Held):
    def __getitem__(self, index):
        """A sample of containers in containers."""
        x, y = self.x[index], self.y[index]
        both: list = [x, (y, index)]
        return {"both": both, "none": (), 3: {"x": x}}


class Numbered(Held):
    def __getitem__(self, index):
        return self.x[index], self.y[index], index


class Trailing(Held):
    def __getitem__(self, index):
        return [self.x[index], {"index": index}, ()]


class Alone(Held):
    def __getitem__(self, index):
        return self.y[index]


class Indices(Held):
    def __getitem__(self, index):
        return index


X = torch.arange(24.0).reshape(12, 2)
NUMBERS = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "?"]
COLUMNS = [
    torch.arange(12) % 3,
    torch.rand(12, 2, 3, generator=torch.Generator().manual_seed(0)).bfloat16(),
    numpy.arange(36, dtype="f4").reshape(12, 3, 1),
    *((numpy.arange(12) % 5).astype(kind) for kind in NUMBERS),
]


def read_of(loader):
    """What a pass reads: the containers, the numbers, and how they lie in memory."""
    found = [tree_flatten(batch) for batch, _ in batches(loader)]
    return [([(x.dtype, x.stride(), x.tolist()) for x in leaves], spec) for leaves, spec in found]


def read(rows, *indices, epoch=0):
    """The batch of these indices."""
    placed = BatchIndices(indices)
    placed.place = 3, epoch, 0
    return rows.__getitems__(placed)


def kind_of(dataset, **kwargs):
    return type(Feed(DataLoader(dataset, 3, **kwargs)).loader.dataset)


@pytest.mark.parametrize("kind", [Pair, Nested, Numbered, Trailing, Alone, Indices])
@pytest.mark.parametrize("y", COLUMNS, ids=lambda y: f"{type(y).__name__}-{y.dtype}")
def test_a_class_that_does_nothing_but_index_is_read_as_if_collated(kind, y):
    dataset = Subset(kind(x=X, y=y), [5, 1, 8, 3, 3, 11, 0])
    assert kind_of(dataset) is TensorRows
    expected = read_of(DataLoader(Slow(dataset), 3, shuffle=True))
    assert read_of(DataLoader(dataset, 3, shuffle=True)) == expected


def test_its_samples_are_asked_for_once_to_see_what_they_are():
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_code is Pair.__getitem__.__code__:
            calls.append(frame.f_locals["index"])

    loader = DataLoader(Pair(x=X, y=COLUMNS[2]), 3)
    sys.setprofile(note)
    try:
        batches(loader)
    finally:
        sys.setprofile(None)
    assert not {*range(12)} & {*filter(lambda each: type(each) is int, calls)}
    assert len(calls) == 2  # by the loader that is made, and with the first batch


def test_in_workers_too():
    datasets = Nested(x=X, y=COLUMNS[2]), Slow(Nested(x=X, y=COLUMNS[2]))
    found, expected = (read_of(DataLoader(each, 5, num_workers=1)) for each in datasets)
    assert found == expected


class Drawing(Held):
    def __getitem__(self, index):
        return self.x[index] + torch.rand(())


class Asking(Held):
    def __getitem__(self, index):
        if index == 3:
            return self.x[0]
        return self.x[index]


class Constant(Held):
    def __getitem__(self, index):
        return self.x[index], 1


class Whole(Held):
    def __getitem__(self, index):
        return self.x


class Partial(Held):
    def __getitem__(self, index):
        return self.x[index, 0]


class Calling(Held):
    def __getitem__(self, index):
        return self.x[index].clone()


class Property(Held):
    @property
    def x(self):
        return X + torch.rand(())

    def __getitem__(self, index):
        return self.x[index]


class AtOnce(Pair):
    def __getitems__(self, indices):
        return [(self.x[index] + torch.rand(()), 1) for index in indices]


class ForAnEpoch(Pair):
    def set_epoch(self, epoch):
        self.x = X + torch.rand(())


class AnyAttribute(Alone):
    def __getattribute__(self, name):
        return torch.rand(12) if name == "y" else super().__getattribute__(name)


class Keys(Held):
    def __getitem__(self, index):
        return {True: self.x[index]}


class NamedKeys(Held):
    def __getitem__(self, index):
        return {self.__class__.__name__: self.x[index]}


class Formatted(Held):
    def __getitem__(self, index):
        return {"row %s" % index: self.x[index]}  # noqa: UP031 - another operator


class Unreturned(Held):
    def __getitem__(self, index):
        x, _ = self.x[index], self.y[index]  # an error, if y is shorter
        return x


SEEN: list = []
MORE: dict = collections.defaultdict(list)


class Remembering(Held):
    def __getitem__(self, index, seen=SEEN):
        seen += [index]
        return self.x[index]


class WithDefault(Held):
    def __getitem__(self, index, more=MORE):
        return self.x[index], more[index]


class Static(Held):
    @staticmethod
    def __getitem__(index, other=5):
        return other


class Several(Held):
    def __getitem__(self, *indices):
        return indices


class Chosen(Held):
    def __getitem__(self, index):
        return {0: self.x[index], index: self.y[index]}[0]


class Compared(Held):
    def __getitem__(self, index):
        x, y = self.x[index], self.y[index]
        return {x: 0, y: 1}[y], x, y


class Passed(Held):
    def __getitem__(self, index):
        return [self.x, self.y][1][index]


class Transposed(Held):
    T = None

    def __getitem__(self, index):
        return self.x[index].T


class Named(Held):
    def __init__(self):
        self.name = X

    def __getitem__(self, index):
        return {self.x[index].name: self.x[index]}, self.name[index]


class Hidden(Held):
    @types.DynamicClassAttribute
    def x(self):
        return torch.rand(12)

    def __getitem__(self, index):
        return self.x[index]


class Delegating(Alone):
    def __getattr__(self, name):
        raise AttributeError(torch.rand(()))


class Unknown(Held):
    def __getitem__(self, index):
        return self.nothing[index]


class Builtin(Held):
    __getitem__ = dict.get


@pytest.mark.parametrize(
    "kind",
    [
        *(Drawing, Asking, Constant, Whole, Partial, Calling, Property, AtOnce, ForAnEpoch),
        *(AnyAttribute, Keys, NamedKeys, Formatted, Unreturned, Remembering, WithDefault, Static),
        *(
            Several,
            Chosen,
            Compared,
            Passed,
            Transposed,
            Named,
            Hidden,
            Delegating,
            Unknown,
            Builtin,
        ),
    ],
)
def test_a_class_that_does_anything_else_is_seeded_and_asked(kind):
    dataset = kind()
    dataset.__dict__.update(x=X, y=X, T=X)
    assert kind_of(dataset) is SeededDataset


@pytest.mark.parametrize(
    "y",
    [
        list(range(12)),
        torch.nn.Parameter(X),
        numpy.arange(12).astype("u8"),
        numpy.arange(12).astype(">f8"),
        numpy.array(["a"] * 12),
        numpy.zeros((2, 12)).T,
        numpy.ma.zeros(12),
        numpy.array(3.0),
        numpy.arange(1.0)[::-1],
        numpy.frombuffer(bytes(96)),  # torch warns that it must not be written to
    ],
    ids=lambda y: f"{type(y).__name__}{getattr(y, 'dtype', '')}",
)
def test_so_is_one_of_other_attributes(y):
    assert kind_of(Alone(y=y)) is SeededDataset


def test_so_is_one_with_a_collate_fn_or_another_default(monkeypatch):
    assert kind_of(Alone(y=X), collate_fn=len) is SeededDataset
    monkeypatch.setitem(default_collate_fn_map, tuple, lambda batch, *, collate_fn_map: len(batch))
    assert [batch for batch, _ in batches(DataLoader(Pair(x=X, y=X), 5))] == [5, 5, 2]


def test_a_default_that_is_changed_between_batches_is_used_at_once(monkeypatch):
    rows = TensorRows(Alone(y=X), default_collate)
    assert read(rows, 1).tolist() == [[2, 3]]

    @functools.wraps(collate_tensor_fn)
    def doubled(batch, *, collate_fn_map):
        return 2 * torch.stack(batch)

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, doubled)
    assert read(rows, 1).tolist() == [[4, 6]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_subset_hears_of_the_epoch(workers):
    subset = Subset(Alone(y=torch.arange(12)), [0, 1])
    subset.set_epoch = lambda epoch: setattr(subset, "indices", [epoch, epoch + 1])
    loader = DataLoader(subset, 2, num_workers=workers, persistent_workers=bool(workers))
    feed, found = Feed(loader, seed=3), []
    for epoch in range(3):
        feed.set_epoch(epoch)
        found += [current.batch.tolist() for current in feed.rounds()]
    feed.close()
    assert found == [[0, 1], [1, 2], [2, 3]]


@pytest.mark.parametrize("dataset", [Alone(y=X), TensorDataset(X)])
def test_a_subset_indexes_as_torch_does(dataset):
    subset = Subset(dataset, torch.tensor([5, 4, 3]))
    for indices in ([[0], [1]], [[0, 1], [1, 2]]):
        plain = DataLoader(subset, batch_sampler=[indices])
        assert str(batches(plain)[0][0]) == str(next(iter(plain)))


def test_a_class_that_begins_to_draw_is_seeded_from_then_on(monkeypatch):
    """As IPython's autoreload changes a class, whose loader is prepared already."""
    dataset = Pair(x=X, y=X)
    feed = Feed(DataLoader(dataset, 3, shuffle=True), seed=3)
    feed.set_epoch(1)
    assert len(list(feed.rounds())) == 4
    monkeypatch.setattr(Pair.__getitem__, "__code__", Drawing.__getitem__.__code__)
    found = [current.batch.tolist() for current in feed.rounds()]
    torch.rand(())
    assert [current.batch.tolist() for current in feed.rounds()] == found
    fresh = Drawing(x=X, y=X)
    assert [batch.tolist() for batch, _ in batches(DataLoader(fresh, 3, shuffle=True))] == found


def test_attributes_may_be_replaced_and_changed_between_batches():
    rows = TensorRows(dataset := Pair(x=X.clone(), y=numpy.zeros(4)), default_collate)
    dataset.y[1] = 7
    assert read(rows, 1)[1].tolist() == [7]
    dataset.y.resize(12)  # possible as long as nobody else refers to it
    dataset.y[11] = 5
    assert read(rows, 11)[1].tolist() == [5]
    dataset.y.shape = 6, 2
    assert read(rows, 5)[1].tolist() == [[0, 5]]
    dataset.y = torch.arange(12)
    assert read(rows, 1)[1].tolist() == [1]
    dataset.y = dataset.x.t().contiguous().t()
    x, y = read(rows, 2, 0)
    assert torch.equal(x, y)
    assert y.is_contiguous()
    dataset.x.requires_grad_()
    assert read(rows, 2)[0].requires_grad
    dataset.y = list("abc")
    assert read(rows, 2, 0)[1] == ("c", "a")


def test_a_list_of_tensors_is_read_anew_too():
    rows = TensorRows(dataset := TensorDataset(X), default_collate)
    dataset.tensors = [X]
    assert len(read(rows, 1)) == 1
    dataset.tensors.append(X + 1)
    assert [part.tolist() for part in read(rows, 1)] == [[[2, 3]], [[3, 4]]]


def test_a_class_is_looked_at_again_in_the_next_epoch(monkeypatch):
    rows = TensorRows(Pair(x=X, y=X), default_collate)
    assert read(rows, 1)[0].tolist() == [[2, 3]]
    monkeypatch.setattr(
        Pair, "x", property(lambda self: X + 1, lambda self, x: None), raising=False
    )
    assert read(rows, 1, epoch=1)[0].tolist() == [[3, 4]]
    rows.dataset.__class__ = Whole
    assert read(rows, 1, epoch=1).shape == (1, 12, 2)


@pytest.mark.parametrize("kind", [torch.uint16, torch.uint32, torch.uint64])
def test_types_that_torch_cannot_index_are_stacked(kind):
    rows = TensorRows(Alone(y=torch.arange(4).to(kind)), default_collate)
    assert torch.equal(read(rows, 1, 3), torch.tensor([1, 3], dtype=kind))


def test_samples_in_another_memory_format_are_stacked_in_it():
    maps = torch.rand(4, 2, 3, 1, 1)
    found = read(TensorRows(Alone(y=maps), default_collate), 1, 2)
    assert found.stride() == default_collate([maps[1], maps[2]]).stride()


def test_a_class_without_a_dict_has_an_index():
    class Slots:
        __slots__ = ()

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return index

    assert [batch.tolist() for batch, _ in batches(DataLoader(Slots(), 2))] == [[0, 1], [2, 3]]


def test_another_dataset_in_a_subset_is_read_too():
    subset = Subset(Alone(y=X), [2, 1])
    rows = TensorRows(subset, default_collate)
    assert read(rows, 0).tolist() == [[4, 5]]
    subset.dataset = [7, 8, 9]
    assert read(rows, 0).tolist() == [9]


def test_what_a_subset_draws_is_seeded():
    class Anywhere(list):
        def __getitem__(self, index):
            return random.randrange(12)

    loader = DataLoader(Subset(Alone(y=X), Anywhere(range(12))), 3)
    found = []
    for seed in (0, 1):
        random.seed(seed)
        before = random.getstate()
        found.append(read_of(loader))
        assert random.getstate() == before
    assert found[0] == found[1]


def test_arrays_and_indices_follow_the_default_device():
    rows = [
        TensorRows(dataset, default_collate)
        for dataset in (Alone(y=COLUMNS[2]), Indices(), Alone(y=X))
    ]
    with torch.device("meta"):
        assert [read(each, 1).device.type for each in rows] == ["meta", "meta", "cpu"]
    assert [read(each, 1).device.type for each in rows] == ["cpu"] * 3


def test_a_tensor_without_rows_is_the_error_that_it_was():
    with pytest.raises(IndexError, match="invalid index of a 0-dim tensor"):
        batches(DataLoader(Alone(y=torch.tensor(3.0)), 2))


def twice(self, index):
    return index, index, self.x[index], self.x[index]


def test_each_part_of_a_batch_has_its_own_memory():
    dataset = type("Twice", (Held,), {"__getitem__": twice})(x=X)
    ((batch, _),) = batches(DataLoader(dataset, 12))
    assert len({part.data_ptr() for part in (*batch, X)}) == 5


def test_a_copy_has_tensors_of_its_own():
    rows = TensorRows(Nested(x=X, y=COLUMNS[0]), default_collate)
    read(rows, 0)
    for twin in (copy.deepcopy(rows), pickle.loads(pickle.dumps(rows))):
        twin.dataset.x += 1
        found = read(twin, 1)
        assert found["both"][0].tolist() == found[3]["x"].tolist() == [[3, 4]]
        assert found["both"][1][1].tolist() == [1]


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * tensor for tensor in super().__getitem__(index))


def test_a_class_of_the_users_own_is_asked_for_each_sample():
    found = batches(DataLoader(Doubled(torch.arange(4)), 4))
    assert found[0][0][0].tolist() == [0, 2, 4, 6]
    found = batches(DataLoader(Subset(Doubled(torch.arange(4)), [3, 1]), 4))
    assert found[0][0][0].tolist() == [6, 2]


def test_a_collate_fn_and_a_changed_default_are_used(monkeypatch):
    dataset = TensorDataset(torch.arange(4))
    assert batches(DataLoader(dataset, 2, collate_fn=len)) == [(2, 2), (2, 2)]
    monkeypatch.setitem(
        default_collate_fn_map, torch.Tensor, lambda batch, *, collate_fn_map: len(batch)
    )
    assert batches(DataLoader(dataset, 4))[0][0] == [4]


def test_tensors_may_be_replaced_between_batches(monkeypatch):
    rows = TensorRows(dataset := TensorDataset(torch.arange(4)), default_collate)
    assert read(rows, 1, 2)[0].tolist() == [1, 2]
    dataset.tensors = (torch.rand(4, 2, 3, 3).to(memory_format=torch.channels_last),)
    (expected,) = default_collate([dataset[1], dataset[0]])
    taken = counted(monkeypatch)
    (found,) = read(rows, 1, 0)
    assert torch.equal(found, expected)
    assert taken == [1, 0]


def test_it_is_the_dataset_in_everything_else():
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
def test_a_dataset_that_stops_ends_the_epoch(size, caplog):
    loader = DataLoader(Ending(), size)
    read, total = (2, 3) if size else (4, 6)
    assert len(batches(loader)) == len(list(loader)) == read
    (told,) = caplog.messages
    assert told.startswith(
        f"The dataset (Ending) ended epoch 1 by StopIteration after {read} of {total} batches"
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_is_read_to_its_end_or_left_says_nothing(workers, caplog):
    loader = DataLoader(range(12), 2, num_workers=workers)
    assert len(batches(loader)) == 6
    feed = Feed(loader)
    feed.limit = 2
    feed.set_epoch(0)
    assert len(list(feed.rounds())) == 2
    rounds = feed.rounds()
    next(rounds)
    rounds.close()
    feed.close()
    assert caplog.messages == []


def test_a_timeout_without_workers_is_refused_as_ever():
    with pytest.raises(AssertionError):
        batches(DataLoader(DATA, 2, timeout=1))


def test_memory_is_pinned_by_torch():
    """Where there is an accelerator; elsewhere torch says that there is none."""
    if torch.accelerator.is_available():
        ((batch, _), *_) = batches(DataLoader(DATA, 5, pin_memory=True))
        assert batch[0].is_pinned()
    else:
        with pytest.warns(UserWarning, match="no accelerator is found"):
            batches(DataLoader(DATA, 5, pin_memory=True))
