"""Copy logged values, and convert them for tracking services: images, figures, tables and so on."""

from __future__ import annotations

import copy
import csv
import io
import math
import os
from argparse import Namespace
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.errors import module_logger
from trainer.strict_json import python_number

_logger = module_logger("trackers")
_CHANNELS = (1, 3, 4)
_HOLDERS = (Namespace, SimpleNamespace, set, deque, bytearray)  # found in configurations
# Modes of PIL images whose numbers are not gray or RGB(A) values.
_MODES = ("P", "PA", "LA", "CMYK", "YCbCr", "HSV", "LAB")


def snapshot(value: Any, arrivals: list[Any]) -> Any:
    """Return a copy of a logged value, without waiting for a device.

    Later changes of the original do not affect it. Tensors on devices are copied to the host
    asynchronously.

    Args:
        value: a tensor, an array, a PIL image, a data frame, or dicts, lists and tuples of these. A
            matplotlib figure is replaced by its pixels. The copy of a namespace, dataclass or set
            is shallow. Other objects are returned as they are.
        arrivals: a list to which an event is added for each tensor that is still being copied. Call
            the event's `synchronize()` before reading the copy.
    """
    if isinstance(value, dict):
        return {key: snapshot(item, arrivals) for key, item in value.items()}
    if type(value) in (list, tuple):  # a subclass may have another constructor
        return type(value)(snapshot(item, arrivals) for item in value)
    if hasattr(value, "detach"):
        return _to_host(value.detach(), arrivals)
    if hasattr(value, "set_canvas"):
        return render_figure(value)
    if isinstance(value, _HOLDERS) or (is_dataclass(value) and not isinstance(value, type)):
        return copy.copy(value)  # shallow: it may hold a model
    if not (hasattr(value, "__array__") or hasattr(value, "__array_interface__")):
        return value
    # Data frames of polars have no method `copy`; `copy.copy` of others may share their data.
    return value.copy() if hasattr(value, "copy") else copy.copy(value)


def size_of(value: Any) -> int:
    """Return the approximate memory of a copy in bytes; 0 for a single number."""
    if value is None or isinstance(value, (bool, int, float)):
        return 0
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(size_of, value)) + 32 * len(value)
    if isinstance(value, (str, bytes)):
        return len(value)
    if hasattr(value, "getbands"):  # a PIL image
        return int(value.width * value.height * len(value.getbands()))
    # The size of a data frame is estimated from its shape.
    size = None if hasattr(value, "columns") else getattr(value, "nbytes", None)
    return size if isinstance(size, int) else 8 * math.prod(getattr(value, "shape", None) or (0,))


def _to_host(tensor: Any, arrivals: list[Any]) -> Any:
    if tensor.device.type == "cpu":
        return tensor.clone()
    from trainer.tree import start_copy_to_host  # imports torch

    host, event = start_copy_to_host(tensor)
    arrivals.append(event)
    return host


def named_values(value: Any) -> dict[Any, Any] | None:
    """Return a mapping, a namespace or a dataclass instance as a dict; None for anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (Namespace, SimpleNamespace)):
        return dict(vars(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def plain(value: Any) -> Any:
    """Return nested dicts, lists and primitive values unchanged, anything else as its `str`."""
    value = python_number(value)
    if (named := named_values(value)) is not None:
        return {str(key): plain(item) for key, item in named.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    # Only exact types, because YAML's safe dumper does not accept subclasses.
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def flatten(values: dict[str, Any], separator: str = "/") -> dict[str, Any]:
    """Flatten nested dicts to names such as "outer/inner"; one-element tensors become numbers."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        value = python_number(value)
        if isinstance(value, dict):
            inner = flatten(value, separator)
            flat |= {f"{name}{separator}{key}": item for key, item in inner.items()}
        else:
            flat[name] = value
    return flat


def scalars_and_texts(
    values: dict[str, Any],
) -> tuple[dict[str, float], dict[str, str], TypeError | None]:
    """Return the numbers and the texts among values, by name, and the error for all others."""
    flat = flatten(values)
    numbers = {name: value for name, value in flat.items() if isinstance(value, (int, float))}
    texts = {name: value for name, value in flat.items() if isinstance(value, str)}
    others = [name for name in flat if name not in numbers and name not in texts]
    if not others:
        return numbers, texts, None
    refused = ", ".join(f"{name} ({type(flat[name]).__name__})" for name in others)
    text = f"{refused}: only numbers, one-element tensors, texts and dicts of these can be logged."
    return numbers, texts, TypeError(f"{text} Use log_images for images.")


def require_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file or folder to be uploaded.

    Raises:
        FileNotFoundError: the path does not exist.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"There is no file or folder at {path}.")
    return Path(path)


def to_numpy(value: Any) -> Any:
    """Return a tensor, array or list as a NumPy array; bfloat16 and 8-bit floats become float32."""
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if value.is_floating_point() and value.itemsize < 4:  # NumPy has no bfloat16 or float8
            value = value.float()
    return np.asarray(value)


def image_layout(name: str, images: Any) -> str:
    """Return the layout of an image or a batch of images.

    Args:
        name: the name of the images, for the error.
        images: a tensor or an array.

    Returns:
        "HW", "CHW", "HWC", "NCHW" or "NHWC". Channels come first, unless only the last dimension
        is 1, 3 or 4.

    Raises:
        ValueError: there are not two to four dimensions, or not 1, 3 or 4 channels.
    """
    shape = tuple(images.shape)
    if len(shape) == 2:
        return "HW"
    first, last = (len(shape) in (3, 4) and shape[at] in _CHANNELS for at in (-3, -1))
    if not (first or last):
        raise ValueError(
            f"The images {name!r} have the shape {shape}; give (H, W), or (C, H, W), (B, C, H, W) "
            "or (…, H, W, C) with 1, 3 or 4 channels; a batch without channels as images[:, None]."
        )
    return ("N" if len(shape) == 4 else "") + ("CHW" if first else "HWC")


def image_bytes(images: Any) -> Any:
    """Convert images of floats in [0, 1], bools, or integers up to 255 to a uint8 array."""
    import numpy as np

    if getattr(images, "mode", None) in _MODES:
        images = images.convert("RGBA" if images.has_transparency_data else "RGB")
    array = to_numpy(images)
    if array.dtype.kind in "fb":
        array = (np.nan_to_num(array.astype(np.float64)).clip(0, 1) * 255).round()
    return array.clip(0, 255).astype(np.uint8)


def pixels(name: str, images: Any) -> list[Any]:
    """Return each image as a uint8 array of shape `(H, W)` or `(H, W, C)`.

    Args:
        name: the name of the images, for the error.
        images: a tensor or an array of one image or a batch, see `image_layout`: floats in
            [0, 1], integers up to 255 or boolean masks; a PIL image; or a list of these.

    Raises:
        ValueError: the shape is not that of an image.
    """
    import numpy as np

    if isinstance(images, (list, tuple)):
        return [image for item in images for image in pixels(name, item)]
    array = image_bytes(images)
    layout = image_layout(name, array)
    if layout.endswith("CHW"):
        array = np.moveaxis(array, -3, -1)
    return list(array) if layout.startswith("N") else [array]


def to_pil(image: Any) -> Any:
    """Return an array of shape `(H, W)` or `(H, W, C)` as a PIL image, and others unchanged."""
    if not hasattr(image, "shape"):
        return image
    from PIL import Image

    return Image.fromarray(image.squeeze())


def render_figure(figure: Any) -> Any:
    """Draw a matplotlib figure.

    Args:
        figure: the figure, or its pixels, which are returned as they are.

    Returns:
        A uint8 array of shape `(height, width, 3)`.
    """
    if hasattr(figure, "shape"):
        return figure
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    former = figure.canvas
    try:
        canvas: Any = FigureCanvasAgg(figure)  # it replaces the figure's own canvas
        canvas.draw()
        return to_numpy(canvas.buffer_rgba())[..., :3].copy()
    finally:
        figure.set_canvas(former)


def finite_values(name: str, values: Any) -> Any:
    """Return a histogram's finite values, of shape `(N,)`; warn if non-finite ones are left out.

    Raises:
        ValueError: the values include no finite number.
    """
    import numpy as np

    array = to_numpy(values).reshape(-1).astype(np.float64)
    numbers = array[np.isfinite(array)]
    if not len(numbers):
        raise ValueError(f"The histogram {name!r} has no finite value among {len(array)}.")
    if len(numbers) < len(array):
        _logger.warning(
            "The histogram %r leaves out %d of %d values, which are NaN or infinite.",
            name,
            len(array) - len(numbers),
            len(array),
        )
    return numbers


def table_of(
    name: str, columns: Sequence[Any] | None, data: Any, dataframe: Any
) -> tuple[list[Any], list[list[Any]]]:
    """Return the columns and the rows of a table.

    Args:
        name: the table's name.
        columns: the names of the columns; numbers from 1 by default.
        data: the rows.
        dataframe: a data frame of pandas or polars, instead of `columns` and `data`.

    Raises:
        ValueError: neither `data` nor `dataframe` is given, or a row is not as long as `columns`.
    """
    if dataframe is not None:
        columns = list(dataframe.columns)
        # pandas: row by row, so that integers in rows with floats stay integers. It is checked
        # first, since a pandas column may be called "rows".
        of_pandas = hasattr(dataframe, "itertuples")
        data = dataframe.itertuples(False, None) if of_pandas else dataframe.rows()
    if data is None:
        raise ValueError(
            f"The table {name!r} is empty: give `data`, a list of rows, or `dataframe`."
        )
    data = list(data)  # an array has no truth value
    if columns is None:
        columns = range(1, len(data[0]) + 1) if data else []
    for number, row in enumerate(data):
        if len(row) != len(columns):
            raise ValueError(
                f"Row {number} of the table {name!r} has {len(row)} cells, but there are "
                f"{len(columns)} columns: {list(columns)}."
            )
    return list(columns), [[python_number(cell) for cell in row] for row in data]


def to_csv(columns: list[str], rows: list[list[Any]]) -> str:
    """Return a table as the text of a CSV file."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows([columns, *rows])
    return text.getvalue()
