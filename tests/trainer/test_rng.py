"""Seeds, generator states, and stretches of code that leave them alone."""

from __future__ import annotations

import json
import random

import numpy
import pytest
import torch

from trainer.rng import (
    isolated_rng,
    load_rng_state,
    mix,
    rng_state,
    seed_generators,
    seeded_iteration,
    set_seed,
)


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), torch.rand(1).item()


def test_mix_is_a_fixed_function():
    # A new function would change the order of every run that is resumed.
    assert mix(0) == 0xE220A8397B1DCDAF >> 1  # SplitMix64's first number for seed 0
    assert [mix(1, 2), mix(2, 1)] == [6804074658870690613, 8085905411993364802]


def test_mix_tells_apart_what_lies_close():
    seeds = {mix(a, b) for a in range(40) for b in range(40)}
    assert len(seeds) == 1600
    assert all(0 <= seed < 2**63 for seed in seeds)
    # About half of the bits of neighbours differ.
    flips = [(mix(a, 0) ^ mix(a + 1, 0)).bit_count() for a in range(500)]
    assert 30 < sum(flips) / len(flips) < 33


def test_mix_takes_numbers_of_any_size_and_sign():
    assert mix(2**64 + 5) == mix(5)
    assert mix(-1) == mix(2**64 - 1)


def test_set_seed_seeds_all_three_generators():
    set_seed(5)
    first = draw()
    set_seed(5)
    assert draw() == first
    set_seed(6)
    assert not set(draw()) & set(first)


def test_set_seed_agrees_with_the_generators_own_seeding():
    set_seed(5)
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


def test_seeds_beyond_numpys_range_are_taken():
    seed_generators(2**63 - 1)
    first = draw()
    seed_generators(2**63 - 1)
    assert draw() == first


def test_state_puts_all_generators_back():
    draw()
    random.gauss(0, 1)  # keeps a second number for later, which is state too
    state = rng_state()
    first = draw(), random.gauss(0, 1)
    load_rng_state(state)
    assert (draw(), random.gauss(0, 1)) == first


def test_state_survives_lists_in_place_of_tuples():
    state = rng_state()
    state["python"] = json.loads(json.dumps(state["python"]))
    state["numpy"] = list(state["numpy"])
    first = draw()
    load_rng_state(state)
    assert draw() == first


def test_isolation_holds_also_when_an_error_leaves_it():
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


def test_seeded_iteration_and_its_surroundings_do_not_meet():
    inside = list(seeded_iteration(numbers(3), 3))
    set_seed(1)
    outside = [draw() for _ in range(3)]
    set_seed(1)
    pairs = [(value, draw()) for value in seeded_iteration(numbers(3), 3)]
    assert [pair[0] for pair in pairs] == inside
    assert [pair[1] for pair in pairs] == outside


def test_seeded_iteration_covers_the_making_of_the_iterator():
    class Shuffled:
        def __iter__(self):
            return iter(torch.randperm(10).tolist())

    set_seed(1)
    first = list(seeded_iteration(Shuffled(), 3))
    assert first == list(seeded_iteration(Shuffled(), 3))
    assert sorted(first) == list(range(10))
