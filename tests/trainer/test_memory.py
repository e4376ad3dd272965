"""Batch sizes that fit, and memory given back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from trainer.memory import find_executable_batch_size, release_memory

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("anything"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 9.04 GB)"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_the_size_is_reduced_until_it_fits(error):
    tried = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size, a, *, b):
        tried.append((batch_size, a, b))
        if batch_size > 60:
            raise error
        return batch_size + 1

    assert train("a", b="b") == 58
    assert [each[0] for each in tried] == [100, 90, 81, 72, 64, 57]
    assert {each[1:] for each in tried} == {("a", "b")}


@pytest.mark.parametrize("decorate", [True, False])
def test_the_next_size_is_that_of_a_function(decorate):
    sizes = iter([90, 80])
    tried = []

    def train(batch_size):
        tried.append(batch_size)
        if batch_size > 80:
            raise OUT_OF_MEMORY[0]
        return batch_size

    options = {"starting_batch_size": 100, "reduce_batch_size_fn": lambda: next(sizes)}
    if decorate:
        train = find_executable_batch_size(**options)(train)
    else:
        train = find_executable_batch_size(train, **options)
    assert train() == 80
    assert tried == [100, 90, 80]


def test_the_real_error_of_the_cpu_is_recognised():
    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size):
        if batch_size == 2:
            torch.empty(2**60, dtype=torch.uint8)
        return batch_size

    assert train() == 1


def test_plain_form_and_default():
    assert find_executable_batch_size(lambda size: size)() == 128
    assert find_executable_batch_size(lambda size: size, 7)() == 7
    assert find_executable_batch_size(function=lambda size: size, starting_batch_size=8)() == 8

    @find_executable_batch_size
    def documented(batch_size):
        """Said of it."""

    assert documented.__name__ == "documented"
    assert documented.__doc__ == "Said of it."


@pytest.mark.parametrize("start", [0, 5])
def test_zero_is_the_end(start):
    @find_executable_batch_size(starting_batch_size=start)
    def train(batch_size):
        raise RuntimeError("CUDA out of memory: the card is full")

    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero") as found:
        train()
    assert ("the card is full" in str(found.value)) == (start > 0)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("out of memory")])
def test_other_errors_pass_at_once(error):
    tried = []

    @find_executable_batch_size
    def train(batch_size):
        tried.append(batch_size)
        raise error

    with pytest.raises(type(error)) as found:
        train()
    assert found.value is error
    assert tried == [128]


def test_passing_the_size_too_is_an_error_with_the_fix():
    @find_executable_batch_size
    def train(batch_size, model):
        raise AssertionError("not reached")

    with pytest.raises(TypeError, match=r"train\(8, 'model'\) has wrong arguments: .*leave it out"):
        train(8, "model")
    with pytest.raises(TypeError, match=r"train\(model='m', batch_size=8\).*batch_size"):
        train(model="m", batch_size=8)
    with pytest.raises(TypeError, match="missing a required argument: 'model'"):
        train()
    with pytest.raises(TypeError, match="first argument"):
        find_executable_batch_size(lambda: None)()


def test_the_failed_try_holds_nothing_when_the_next_begins():
    alive = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size):
        alive.append([reference() is not None for reference in held])
        tensor = torch.ones(3)
        loop = [tensor]
        loop.append(loop)  # only the collector finds this
        held.append(weakref.ref(tensor))
        if batch_size == 2:
            raise torch.OutOfMemoryError

    held: list[weakref.ref[torch.Tensor]] = []
    gc.disable()
    try:
        train()
    finally:
        gc.enable()
    assert alive == [[], [False]]


def test_released_objects_are_collected():
    class Node:
        pass

    node, other = Node(), Node()
    node.itself = node
    reference = weakref.ref(node)
    del node
    gc.disable()
    try:
        assert release_memory(other, 3) == [None, None]
        assert reference() is None
    finally:
        gc.enable()
    assert release_memory() == []


@pytest.mark.gpu
def test_released_memory_is_given_back():
    # So large that it has a segment of its own, which nothing else keeps alive.
    tensor = torch.ones(2**24, device="cuda")
    reserved = torch.cuda.memory_reserved()
    del tensor
    release_memory()
    assert torch.cuda.memory_reserved() < reserved
