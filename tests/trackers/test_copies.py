from argparse import Namespace
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from trackers.media import size_of, snapshot


def test_changes_in_place_do_not_reach_the_copy():
    leaf, deep = torch.ones(2, requires_grad=True), torch.zeros(1)
    rows = [np.zeros(1), ({"deep": deep},)]
    values, arrivals = {"leaf": leaf, "nested": {"rows": rows}, "scalar": np.float64(2.0)}, []
    copies = snapshot(values, arrivals)
    with torch.no_grad():
        leaf += 1
    deep += 1
    rows[0] += 1
    rows.clear()
    values.clear()
    assert copies["leaf"].tolist() == [1.0, 1.0]
    assert not copies["leaf"].requires_grad
    assert copies["nested"]["rows"][0].tolist() == [0.0]
    assert copies["nested"]["rows"][1][0]["deep"].tolist() == [0.0]
    assert copies["scalar"] == 2.0
    assert arrivals == []  # nothing came from a device


def test_a_copied_configuration_does_not_change():
    @dataclass
    class Options:
        lr: float
        width: int = 64

    options = {"args": Namespace(lr=0.1), "options": Options(0.1), "tags": {"first"}}
    copies = snapshot(options, [])
    options["args"].lr = options["options"].lr = 0.5
    options["tags"].add("second")
    assert copies == {"args": Namespace(lr=0.1), "options": Options(0.1), "tags": {"first"}}
    assert snapshot(Options, []) is Options


def test_how_much_memory_copies_take():
    from PIL import Image

    assert size_of({"loss": 1.0, "flag": True, "none": None}) == 0  # of numbers not worth counting
    assert size_of(([torch.zeros(3), np.zeros(2, np.uint8)], {"text": "abc"})) == 12 + 2 + 3 + 128
    assert size_of({"picture": Image.new("RGB", (5, 7))}) == 105
    assert size_of([[1, 2.5], [3, "x"]]) == 64 + 128 + 1
    kind = type("Frame", (), {"shape": (3, 2), "columns": ["nbytes"], "nbytes": np.ones(3)})
    assert size_of(kind()) == 48  # a column of that name


def test_other_objects_are_taken_as_they_are():
    pair = namedtuple("pair", "a b")(1, [2])
    thing = object()
    copies = snapshot({"pair": pair, "thing": thing}, [])
    assert copies["pair"] is pair
    assert copies["thing"] is thing


@pytest.mark.gpu
def test_tensors_of_a_device_are_on_the_host_once_they_have_arrived():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(1_000_000, device="cuda")
        for _ in range(100):
            tensor += 1
        arrivals = []
        copy = snapshot({"x": tensor}, arrivals)["x"]
        tensor.fill_(-1)
    for event in arrivals:
        event.synchronize()
    assert copy.device.type == "cpu"
    assert torch.equal(copy, torch.full((1_000_000,), 100.0))


def test_a_figure_is_copied_as_pixels():
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2, 1), dpi=50, facecolor="red")
    copies = snapshot({"f": figure}, [])
    figure.set_facecolor("blue")
    assert copies["f"].shape == (50, 100, 3)
    assert copies["f"][0, 0].tolist() == [255, 0, 0]


def test_a_pil_image_is_copied():
    from PIL import Image

    picture = Image.new("RGB", (2, 1), "red")
    copies = snapshot({"nested": [picture]}, [])
    picture.paste("blue", (0, 0, 2, 1))
    assert copies["nested"][0].getpixel((0, 0)) == (255, 0, 0)


def test_arrays_without_a_copy_method_are_copied():
    class Frame:  # as polars has them
        def __init__(self, rows):
            self.rows = rows

        def __array__(self, dtype=None, copy=None):
            return np.array(self.rows)

        def __copy__(self):
            return Frame(list(self.rows))

    frame = Frame([1, 2])
    copy = snapshot({"frame": frame}, [])["frame"]
    frame.rows.clear()
    assert copy.rows == [1, 2]
