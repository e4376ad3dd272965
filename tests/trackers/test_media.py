import numpy as np
import pytest
import torch

from trackers.media import finite_values, image_layout, pixels, render_figure

Figure = pytest.importorskip("matplotlib.figure").Figure
Image = pytest.importorskip("PIL.Image")


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((5, 7), "HW"),
        ((3, 5, 7), "CHW"),
        ((5, 7, 4), "HWC"),
        ((3, 5, 3), "CHW"),  # either may be: the first wins
        ((2, 1, 5, 7), "NCHW"),
        ((2, 5, 7, 1), "NHWC"),
    ],
)
def test_layouts(shape, layout):
    assert image_layout("x", np.zeros(shape)) == layout


@pytest.mark.parametrize("shape", [(3,), (1, 1, 1, 1, 1), (8, 28, 28), (2, 5, 7), (9, 2, 5, 7)])
def test_invalid_image_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"'x' have the shape .*\(C, H, W\).* images\[:, None"):
        pixels("x", np.zeros(shape))


def test_pictures_have_the_colours_that_they_show():
    red = Image.new("RGB", (5, 7), "red")
    assert pixels("x", red)[0].tolist() == [[[255, 0, 0]] * 5] * 7
    assert (
        pixels("x", red.convert("P"))[0].tolist() == [[[255, 0, 0]] * 5] * 7
    )  # numbers of colours
    assert pixels("x", red.convert("CMYK"))[0].tolist() == [[[255, 0, 0]] * 5] * 7
    assert pixels("x", Image.new("LA", (5, 7), (8, 9)))[0].tolist() == [[[8, 8, 8, 9]] * 5] * 7
    assert pixels("x", Image.new("1", (1, 1), 1))[0].tolist() == [[255]]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([0.0, 0.5, 1.0, 2.0, -1.0, float("nan")], [0, 128, 255, 255, 0, 0]),
        ([7, 255, 300, -1], [7, 255, 255, 0]),
        ([True, False], [255, 0]),
    ],
)
def test_values_of_every_type_become_bytes(values, shown):
    (image,) = pixels("x", torch.tensor([values]))
    assert image.dtype == np.uint8
    assert image.tolist() == [shown]


def test_a_list_is_a_batch_of_images_that_may_differ_in_size():
    one, two, three = pixels("x", [torch.zeros(2, 3, 4, 5), np.zeros((6, 7))])
    assert (one.shape, two.shape, three.shape) == ((4, 5, 3), (4, 5, 3), (6, 7))


def test_a_figure_is_drawn_and_left_as_it_is():
    figure = Figure(figsize=(2, 1), dpi=50, facecolor="red")
    canvas = figure.canvas
    image = render_figure(figure)
    assert image.shape == (50, 100, 3)
    assert image[0, 0].tolist() == [255, 0, 0]
    assert figure.canvas is canvas
    assert render_figure(image) is image


def test_histograms_leave_out_what_is_not_finite(caplog):
    assert finite_values("h", torch.tensor([[1, 2], [3, 4]])).tolist() == [1, 2, 3, 4]
    assert not caplog.messages
    assert finite_values("h", np.array([1.0, np.inf, np.nan])).tolist() == [1.0]
    assert caplog.messages == [
        "The histogram 'h' leaves out 2 of 3 values, which are NaN or infinite."
    ]
    with pytest.raises(ValueError, match="'h' has no finite value among 1"):
        finite_values("h", [np.nan])
