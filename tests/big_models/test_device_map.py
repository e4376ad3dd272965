"""Device maps: equal to accelerate's where that is right, and within the limits in any case."""

from __future__ import annotations

import itertools
import warnings

import accelerate.utils
import pytest
import torch
from torch import nn

from trainer import big_models
from trainer.big_models import (
    CustomDtype,
    check_device_map,
    clean_device_map,
    compute_module_sizes,
    compute_module_total_buffer_size,
    find_tied_parameters,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
    infer_auto_device_map,
    init_empty_weights,
    retie_parameters,
)


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)


class Language(nn.Module):
    def __init__(self, layers=4, tied=True, last=True):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Sequential(nn.Linear(16, 50, bias=False)) if last else nn.Identity()
        if tied:
            self.head[0].weight = self.embed.weight


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(10, 10))
        self.layers = nn.Sequential(*(nn.Linear(10, 10 * (3 - n % 3)) for n in range(5)))
        self.register_buffer("table", torch.rand(30))


MODELS = {
    "tied": lambda: Language(),
    "untied": lambda: Language(tied=False),
    "deep": lambda: Language(12, last=False, tied=False),
    "flat": Flat,
}
LIMITS = [
    {"cpu": 20_000},
    {"cpu": 9_000},
    {"cpu": 0},
    {0: 9_000, "cpu": 12_000},
    {0: 12_000, 1: 9_000},
    {0: 7_000, 1: 9_000, 2: 8_000, "cpu": 8_000},
    {0: 100_000, "cpu": 100_000},
    {0: "20KB", 1: "20KiB", "cpu": "1MB", "disk": "1GB"},
    {"mps": 9_000, "disk": 9_000},
]


def places_of(model, device_map):
    """The place of every tensor, whatever names the map uses."""
    names = dict(big_models.named_module_tensors(model, recurse=True))
    return {name: place_of(name, device_map) for name in names}


def place_of(name, device_map):
    fitting = [n for n in device_map if not n or f"{name}.".startswith(f"{n}.")]
    return device_map[max(fitting, key=len)]


@pytest.mark.parametrize("name", MODELS)
def test_helpers_for_sizes_are_those_of_accelerate(name):
    theirs = accelerate.utils
    with init_empty_weights():
        model = MODELS[name]()
    for model._no_split_modules in (None, ["Block"]):
        whole = big_models.calculate_maximum_sizes(model)
        assert whole == theirs.calculate_maximum_sizes(model)
    few = {CustomDtype.INT2: 0.25, CustomDtype.INT4: 0.5, CustomDtype.FP8: 1}
    for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.float8_e4m3fn, torch.float64):
        assert big_models.dtype_byte_size(dtype) == theirs.modeling.dtype_byte_size(dtype)
    assert {dtype: big_models.dtype_byte_size(dtype) for dtype in few} == few
    for size in (7, "3KB", "2.5MiB", "1GB", "1Gb"):
        expected = theirs.convert_file_size_to_int(size)
        assert big_models.convert_file_size_to_int(size) == expected
    for tensor in (torch.ones(3)[1:], torch.empty(2, device="meta")):
        expected = theirs.modeling.id_tensor_storage(tensor)
        assert big_models.id_tensor_storage(tensor) == expected


@pytest.mark.parametrize("kwargs", [{}, {"no_split_module_classes": ["Block"]}, {"dtype": "half"}])
@pytest.mark.parametrize("name", MODELS)
def test_maps_are_those_of_accelerate(name, kwargs, caplog):
    with init_empty_weights():
        model = MODELS[name]()
    for limits, clean in itertools.product(LIMITS, [True, False]):
        theirs = accelerate.utils.infer_auto_device_map(
            model, dict(limits), clean_result=clean, offload_buffers=True, **kwargs
        )
        ours = infer_auto_device_map(
            model, limits, clean_result=clean, offload_buffers=True, **kwargs
        )
        assert places_of(model, ours) == places_of(model, theirs), limits
        assert (sorted(ours) == sorted(theirs)) or not clean, limits
        check_device_map(model, ours)


@pytest.mark.parametrize("low_zero", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_balanced_limits_are_those_of_accelerate(name, low_zero):
    model = MODELS[name]()
    for limits in LIMITS:
        if "mps" in limits or "disk" in limits:
            continue  # which accelerate's does not take here
        for kwargs in ({}, {"no_split_module_classes": ["Block"]}, {"dtype": "half"}):
            theirs = accelerate.utils.get_balanced_memory(
                model, dict(limits), low_zero=low_zero, **kwargs
            )
            assert get_balanced_memory(model, limits, low_zero=low_zero, **kwargs) == theirs


def test_no_limit_is_exceeded_and_room_is_left_for_the_largest_layer():
    model = Language(6)
    sizes = compute_module_sizes(model)
    layer, names = get_max_layer_size(list(model.named_children()), sizes, ["Block"])
    assert (layer, names) == (sizes["blocks.0"], [f"blocks.{n}" for n in range(6)])
    for limit in range(10_000, 60_000, 3_000):
        limits = {0: limit, 1: limit // 2, "cpu": limit // 3}
        found = infer_auto_device_map(model, limits, ["Block"])
        used = dict.fromkeys([*limits, "disk"], 0)
        for name, place in places_of(model, found).items():
            used[place] += sizes[name]
        assert sum(used.values()) == sizes[""]
        assert all(used[place] <= limits[place] for place in limits)
        if used["cpu"] or used["disk"]:
            assert used[0] + layer <= limits[0]
        assert place_of("embed.weight", found) == place_of("head.0.weight", found)
        assert all(len(places_of(block, {"": 0})) == 6 for block in model.blocks)
        split = [n for n in found if n.startswith("blocks.") and n.count(".") > 1]
        assert split == []


def test_a_module_that_fits_is_found_where_the_first_does_not(capsys):
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(5, 5), nn.Linear(20, 20))
    first = infer_auto_device_map(model, {0: 1900, "cpu": 10_000}, verbose=True)
    assert first == {"": "cpu"}
    assert "'0' (1680 bytes) does not fit on 0" in capsys.readouterr().out
    found = infer_auto_device_map(model, {0: 1900, "cpu": 10_000}, fallback_allocation=True)
    assert found == {"0": "cpu", "1": 0, "2": "cpu"}
    none = infer_auto_device_map(model, {0: 100, "cpu": 10_000}, fallback_allocation=True)
    assert none == {"": "cpu"}
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(n, n)) for n in (20, 5, 20)))
    found = infer_auto_device_map(
        deep, {0: 1900, "cpu": 10_000}, ["Sequential"], fallback_allocation=True
    )
    assert found == {"0": "cpu", "1": 0, "2": "cpu"}


def test_buffers_of_split_modules_have_a_place():
    model = nn.Sequential(Flat())
    found = infer_auto_device_map(model, {0: 3_000, "cpu": 3_000})
    assert set(places_of(model, found).values()) == {0, "cpu", "disk"}
    check_device_map(model, found)  # accelerate's gives no place to 0.table


def test_a_warning_names_buffers_that_fit_on_no_accelerator():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(300))
    with pytest.warns(UserWarning, match=r"2408 bytes on an accelerator.*offload_buffers=True"):
        infer_auto_device_map(model, {0: 500, "cpu": 10_000})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer_auto_device_map(model, {0: 500, "cpu": 10_000}, offload_buffers=True)


def test_sizes_are_those_of_the_memory():
    model = Language()
    sizes = compute_module_sizes(model)
    storages = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    assert sizes[""] == sum(storages.values())
    assert sizes["blocks.1"] == sum(p.nbytes for p in model.blocks[1].parameters())
    assert sizes["embed.weight"] == 50 * 16 * 4
    assert sizes["head"] == 0  # tied
    half = compute_module_sizes(model, "float16", {"embed.weight": torch.float64})
    assert half["embed"] == 50 * 16 * 8
    assert half["blocks"] * 2 == sizes["blocks"]
    assert half["norm.num_batches_tracked"] == 8  # is not converted
    assert compute_module_total_buffer_size(model) == 16 * 4 * 2 + 8
    assert compute_module_sizes(nn.Linear(2, 2).half(), "float32")[""] == 24  # as it will be


def test_sizes_of_weights_in_few_bits():
    model = nn.Linear(64, 64, bias=False)
    for dtype, size in (
        (CustomDtype.FP8, 4096),
        (CustomDtype.INT4, 2048),
        (CustomDtype.INT2, 1024),
    ):
        assert compute_module_sizes(model, special_dtypes={"weight": dtype})[""] == size


def test_free_memory_and_sizes_in_words():
    free = get_max_memory()
    assert list(free)[-1] == "cpu"
    assert 0 < free["cpu"] < 2**50
    given = {"disk": 5, "cpu": "1GB", 1: "1GiB", 0: 10}
    assert list(get_max_memory(given).items()) == [(0, 10), (1, 2**30), ("cpu", 10**9), ("disk", 5)]
    assert given["cpu"] == "1GB"
    for wrong in ({"gpu": 1}, {True: 1}, {"cpu": "much"}, {"cpu": -1}):
        with pytest.raises(ValueError, match=r"is not recognized|max_memory\['cpu'\] is"):
            get_max_memory(wrong)


def test_names_of_a_map_are_joined():
    places = {"a.0": 0, "a.1": 0, "b.0": 0, "b.1.x": 1, "b.1.y": 1, "c": 1}
    assert clean_device_map(places) == {"a": 0, "b.0": 0, "b.1": 1, "c": 1}
    assert clean_device_map(dict.fromkeys(places, "cpu")) == {"": "cpu"}
    assert clean_device_map(places, "b.1") == {"a.0": 0, "a.1": 0, "b.0": 0, "b.1": 1, "c": 1}


def test_ties_are_found_and_tied_again():
    with init_empty_weights():
        model = Language()
    assert find_tied_parameters(model) == [["embed.weight", "head.0.weight"]]
    ties = accelerate.utils.find_tied_parameters(model)
    assert find_tied_parameters(model) == ties
    model.head[0].weight = nn.Parameter(torch.rand(50, 16))
    assert find_tied_parameters(model) == []
    retie_parameters(model, ties)
    assert model.embed.weight is model.head[0].weight
    assert not model.embed.weight.is_meta
