"""Seeds, generator states, and stretches of code that leave them alone."""

from __future__ import annotations

import json
import random

import numpy
import pytest
import torch
import torch.distributed as dist

from trainer import rng
from trainer.checkpoint.serialization import load_tree, save_tree
from trainer.enums import RNGType
from trainer.rng import (
    isolated_rng,
    load_rng_state,
    mix,
    next_seed,
    rng_state,
    seeded_iteration,
    set_seed,
    synchronize_rng_states,
)


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), torch.rand(1).item()


def test_mix_is_a_fixed_function():
    # A new function would change the order of every run that is resumed.
    assert mix(0) == 0xE220A8397B1DCDAF >> 1  # SplitMix64's first number for seed 0
    assert [mix(1, 2), mix(2, 1)] == [6804074658870690613, 8085905411993364802]


def test_mix_separates_neighbouring_seeds():
    seeds = {mix(a, b) for a in range(40) for b in range(40)}
    assert len(seeds) == 1600
    assert all(0 <= seed < 2**63 for seed in seeds)
    # About half of the bits of neighbours differ.
    flips = [(mix(a, 0) ^ mix(a + 1, 0)).bit_count() for a in range(500)]
    assert 30 < sum(flips) / len(flips) < 33


def test_set_seed_seeds_all_three_generators():
    set_seed(numpy.int64(5))
    ours = draw()
    random.seed(5)
    numpy.random.seed(5)
    torch.manual_seed(5)
    assert draw() == ours


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_outside_the_range_is_refused(seed):
    with pytest.raises(ValueError, match=f"seed is {seed}; it must lie between"):
        set_seed(seed)


def test_deterministic_is_switched_on_only_where_asked():
    set_seed(1)
    assert not torch.are_deterministic_algorithms_enabled()
    set_seed(1, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()


def test_load_rng_state_restores_all_generators():
    draw()
    random.gauss(0, 1)  # keeps a second number for later, which is state too
    state = rng_state()
    first = draw(), random.gauss(0, 1)
    load_rng_state(state)
    assert (draw(), random.gauss(0, 1)) == first


def test_isolated_rng_restores_after_an_error():
    state = rng_state()
    expected = draw()
    load_rng_state(state)

    @isolated_rng()
    def fail():
        draw()
        raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert draw() == expected


def numbers(count: int):
    for _ in range(count):
        yield draw()


def test_seeded_iteration_is_a_function_of_the_seed():
    first = list(seeded_iteration(numbers(4), 3))
    draw()
    assert list(seeded_iteration(numbers(4), 3)) == first
    assert list(seeded_iteration(numbers(4), 4)) != first
    assert len(set(first)) == 4


def test_seeded_iteration_and_code_around_it_draw_independently():
    inside = list(seeded_iteration(numbers(3), 3))
    set_seed(1)
    outside = [draw() for _ in range(3)]
    set_seed(1)
    pairs = [(value, draw()) for value in seeded_iteration(numbers(3), 3)]
    assert [pair[0] for pair in pairs] == inside
    assert [pair[1] for pair in pairs] == outside


def test_states_of_older_checkpoints_are_taken():
    set_seed(3)
    state = rng_state()
    state["python"] = json.loads(json.dumps(state["python"]))  # lists in place of tuples
    del state["numpy"]
    first = random.random(), torch.rand(1).item()
    set_seed(4)
    load_rng_state(state | {"cuda": torch.zeros(16, dtype=torch.uint8)})  # of another machine
    assert (random.random(), torch.rand(1).item()) == first


class Device:
    """What torch.cuda, torch.xpu and torch.mps do with a generator, without a device."""

    def __init__(self, *numbers: int, initialized: bool = True) -> None:
        self.states = [torch.tensor([number]) for number in numbers]
        self.initialized = initialized
        self.available = True
        self.current = 0

    def is_initialized(self) -> bool:
        return self.initialized

    def is_available(self) -> bool:
        return self.available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return len(self.states)

    def current_device(self) -> int:
        return self.current

    def get_rng_state(self, number: int | None = None) -> torch.Tensor:
        assert self.initialized
        return self.states[self.current if number is None else number].clone()

    def set_rng_state(self, state: torch.Tensor, number: int | None = None) -> None:
        self.states[self.current if number is None else number] = state

    def manual_seed(self, seed: int) -> None:
        assert self.initialized
        self.states[self.current] = torch.tensor([seed])

    def manual_seed_all(self, seed: int) -> None:
        if self.initialized:
            self.states = [torch.tensor([seed]) for _ in self.states]

    def draw(self) -> None:
        self.initialized = True
        self.states[self.current] = self.states[self.current] + 100

    @property
    def numbers(self) -> list[int]:
        return [int(state) for state in self.states]


@pytest.fixture
def devices(monkeypatch) -> list[Device]:
    found = [Device(1, 2, 3), Device(4), Device(5)]
    for name, device in zip(("cuda", "xpu", "mps"), found, strict=True):
        monkeypatch.setattr(torch, name, device)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(rng, "DEVICES_CAN_START", True)
    return found


def test_generators_of_devices_are_kept(devices, tmp_path):
    cuda, xpu, _ = devices
    cuda.current = 1
    state = rng_state()
    for device in devices:
        device.states = [state + 100 for state in device.states]
    save_tree(state, tmp_path, "generators")
    load_rng_state(load_tree(tmp_path, "generators"))
    assert [device.numbers for device in devices] == [[1, 2, 3], [4], [5]]
    cuda.states, cuda.current = cuda.states[:1], 0  # the launcher shows it the second one alone
    load_rng_state(state)
    assert cuda.numbers == [2]
    load_rng_state(state | {"cuda": torch.tensor([8])})  # of a folder that knows the current alone
    assert cuda.numbers == [8]
    xpu.available = False  # the checkpoint is of another machine
    xpu.draw()
    load_rng_state(state)
    assert xpu.numbers == [104]
    cuda.initialized = False  # asking would take memory on it
    assert "cuda" not in rng_state()


def test_isolation_seeds_and_restores_the_current_devices_alone(devices):
    cuda, xpu, mps = devices
    cuda.current = 2
    set_seed(3)
    before = draw()
    set_seed(3)
    cuda.states = [torch.tensor([number]) for number in (1, 2, 3)]
    with isolated_rng(8):
        assert cuda.numbers == [1, 2, 8]
        assert (xpu.numbers, mps.numbers) == ([8], [8])
        inside = draw()
        cuda.states[2] = torch.tensor([0])
    assert cuda.numbers == [1, 2, 3]
    assert draw() == before
    set_seed(8)
    assert draw() == inside
    with isolated_rng():
        assert cuda.numbers == [8, 8, 8]


def test_a_device_that_starts_inside_is_isolated_too(devices):
    cuda = devices[0]
    torch.manual_seed(3)
    cuda.initialized = False
    cuda.states = [torch.tensor([3])] * 3
    with isolated_rng(8):
        assert cuda.numbers == [3, 3, 3]
        cuda.draw()
    assert cuda.numbers == [3, 3, 3]
    cuda.draw()
    with isolated_rng(8):
        cuda.draw()
    assert cuda.numbers == [103, 3, 3]


def test_further_seeds_are_others_and_the_same_again():
    set_seed(5)
    first = [next_seed(), next_seed(), next_seed(1), next_seed()]
    assert first[0] == first[2] == 5
    assert len(set(first)) == 3
    set_seed(5)
    assert [next_seed() for _ in range(2)] == first[:2]
    set_seed(6)
    assert next_seed() == 6
    torch.manual_seed(5)
    assert next_seed() == 5
    torch.manual_seed(6)
    assert next_seed() == 6


def test_every_process_gets_a_seed_of_its_own_where_asked(ranks3):
    def seeded() -> tuple[float, float, float]:
        set_seed(5, device_specific=True)
        return draw()

    found = ranks3(seeded)
    for rank, values in enumerate(found):
        set_seed(5 + rank)
        assert values == draw()


def test_generators_follow_rank_0(ranks3):
    def synchronize(rng_types: list[str | RNGType]) -> list[float]:
        rank = dist.get_rank()
        torch.manual_seed(rank)
        generator = torch.Generator().manual_seed(10 + rank)
        synchronize_rng_states(rng_types, generator)
        return [torch.rand(1).item(), torch.rand(1, generator=generator).item()]

    def expected(seed: int, generator_seed: int) -> list[float]:
        numbers = [torch.Generator().manual_seed(each) for each in (seed, generator_seed)]
        return [torch.rand(1, generator=each).item() for each in numbers]

    assert ranks3(synchronize, ["torch"]) == [expected(0, 10 + rank) for rank in range(3)]
    assert ranks3(synchronize, "torch") == [expected(0, 10 + rank) for rank in range(3)]
    assert ranks3(synchronize, [RNGType.GENERATOR]) == [expected(rank, 10) for rank in range(3)]
    assert ranks3(synchronize, ["generator", "torch"]) == [expected(0, 10)] * 3
    assert ranks3(synchronize, []) == [expected(rank, 10 + rank) for rank in range(3)]


@pytest.mark.parametrize(
    ("rng_types", "text"),
    [
        (["torch", "numpy"], "rng_types is 'numpy'; it must be one of 'generator', 'torch'"),
        (["xla"], "rng_types is 'xla'; it must be one of"),
        ([RNGType.CUDA], "rng_types is 'cuda'.* This process uses cpu"),
        (["torch", "generator"], "no generator was passed: pass generator="),
    ],
)
def test_missing_generators_are_refused(rng_types, text):
    torch.manual_seed(1)
    with pytest.raises(ValueError, match=text):
        synchronize_rng_states(rng_types)


@pytest.mark.gpu
def test_the_rng_state_of_cuda_is_restored():
    torch.rand(1, device="cuda")
    state = rng_state()
    first = torch.rand(2, device="cuda").tolist()
    load_rng_state(state)
    assert torch.rand(2, device="cuda").tolist() == first


@pytest.mark.gpu
def test_isolated_rng_on_cuda():
    set_seed(3)  # in two draws: on CUDA one of four gives other numbers than two of two
    expected = torch.rand(2, device="cuda").tolist() + torch.rand(2, device="cuda").tolist()
    torch.cuda.manual_seed(8)
    drawn = torch.rand(2, device="cuda").tolist()
    set_seed(3)
    found = torch.rand(2, device="cuda").tolist()
    with isolated_rng(8):
        assert torch.rand(2, device="cuda").tolist() == drawn
    found += torch.rand(2, device="cuda").tolist()
    assert found == expected


def numpy_after(draws_before: int, draws_between: int) -> list[list[float]]:
    """What numpy draws around two stretches of its own, which draw an odd number of normals."""
    numpy.random.seed(3)
    drawn = [numpy.random.randn(draws_before).tolist()]
    inside = []
    for seed in (5, 6):
        with isolated_rng(seed):
            inside.append(numpy.random.randn(3).tolist())
        drawn.append(numpy.random.randn(draws_between).tolist())
    with isolated_rng(5), isolated_rng(6):
        inside.append(numpy.random.randn(3).tolist())
    for seed, values in zip((5, 6, 6), inside, strict=True):
        assert values == numpy.random.RandomState(seed).randn(3).tolist()
    return [*drawn, numpy.random.randn(4).tolist()]


@pytest.mark.parametrize("before", [0, 1, 2, 3])
@pytest.mark.parametrize("between", [0, 1, 2])
def test_the_second_normal_of_a_numpy_pair_is_kept(before, between):
    plain = numpy.random.RandomState(3)
    expected = [plain.randn(n).tolist() for n in (before, between, between, 4)]
    assert numpy_after(before, between) == expected


def test_a_number_that_comes_back_with_a_state_is_kept():
    numpy.random.seed(3)
    numpy.random.randn()
    state, expected = numpy.random.get_state(), numpy.random.randn()  # the bits have not moved
    with isolated_rng(5):
        numpy.random.randn()
    numpy.random.set_state(state)
    with isolated_rng(5):
        numpy.random.randn()
    assert numpy.random.randn() == expected


def test_isolated_rng_restores_numpy_after_any_use():
    numpy.random.seed(1)
    before = numpy.random.get_state()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), isolated_rng(7):
            numpy.random.seed(9 + len(numpy.random.randn(3)) // 0)
    after = numpy.random.get_state()
    assert all(numpy.array_equal(a, b) for a, b in zip(before, after, strict=True))


def python_after(seed: int | None) -> list:
    """What Python draws inside and around a stretch of its own, with and without a left over."""
    random.seed(3)
    drawn = []
    for number in range(4):
        drawn += [random.random() for _ in range(300 * number)]  # all places among the words
        with isolated_rng(seed):
            drawn.append([random.getstate(), random.gauss(0, 1), random.random()])
        drawn += [random.getstate(), random.gauss(0, 1)]
    return drawn


@pytest.mark.parametrize("seed", [None, 5])
def test_isolated_rng_restores_python_by_memory_as_by_state(monkeypatch, seed):
    by_words = python_after(seed)
    assert rng._memory_of(random._inst) is not None
    monkeypatch.setattr(rng, "_memory_of", lambda generator: None)
    assert python_after(seed) == by_words
    plain = random.Random(3)
    assert by_words[1:3] == [plain.getstate(), plain.gauss(0, 1)]
    if seed is not None:
        plain.seed(seed)
        assert by_words[0] == [plain.getstate(), plain.gauss(0, 1), plain.random()]


def test_the_memory_of_pythons_generator_is_found_only_where_it_is():
    generator = random.Random(9)
    memory = rng._memory_of(generator)
    before = memory.raw
    first = generator.random()
    memory.raw = before
    assert generator.random() == first
    assert rng._memory_of(generator) is memory

    class Own(random.Random):
        pass

    class Elsewhere(random.Random):
        def getstate(self):
            version, words, left_over = super().getstate()
            return version, (*words[1:], words[0]), left_over

    assert [rng._memory_of(each) for each in (None, random.SystemRandom(), Own(9))] == [None] * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "Random", Elsewhere)
        assert rng._memory_of(Elsewhere(9)) is None


def test_a_device_that_is_chosen_inside_is_not_taken_for_the_one_outside(devices):
    cuda = devices[0]
    with isolated_rng(8):
        cuda.current = 1
    assert cuda.numbers == [1, 2, 3]


@pytest.mark.parametrize("kind", [numpy.random.MT19937, numpy.random.PCG64])
@pytest.mark.parametrize("before", [1, 2])
def test_isolated_rng_restores_other_numpy_bit_generators(kind, before):
    mine = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(kind(4))
        expected = numpy.random.RandomState(kind(4)).randn(6).tolist()
        drawn = numpy.random.randn(before).tolist()
        with isolated_rng(8):
            numpy.random.randn(7)
        assert drawn + numpy.random.randn(6 - before).tolist() == expected
    finally:
        numpy.random.set_bit_generator(mine)
