"""Save nested state (a tree) as JSON, with its tensors in a safetensors file, without pickle.

Values that every JSON parser reads back exactly are written unchanged. Other values are written as
objects whose key ``$`` names the type::

    {"$": "tensor", "name": "state.0.exp_avg"}          # the bytes are in <stem>.safetensors
    {"$": "dict", "items": [[0, …], [1, …]]}            # keys that are not strings keep their type

A loaded tree equals the saved one bit for bit, with the same types, with these exceptions:

* tensors are plain and on the CPU, and none share memory: tensors that shared memory become
  separate copies;
* numpy arrays are C-contiguous;
* a named tuple has the same type name and fields, but a new class.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Container, Iterable, Mapping
from errno import EIO
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.nn.parameter import is_lazy

from trainer.checkpoint.storage import check_file, reading
from trainer.errors import CheckpointError
from trainer.files import read_json
from trainer.names import EXTRA_STATE
from trainer.strict_json import fits_64_bits, is_unicode
from trainer.tree import LocalShards, as_bytes, dense, is_sharded

# The dtypes that safetensors supports; it has no quantized types or wider complex numbers.
DTYPES = frozenset(
    {
        torch.bool,
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
    }
)

PLAIN = (torch.Tensor, torch.nn.Parameter)  # tensor types whose storage holds their values

_MARK = b"cadence-extra-state\0"  # begins a tensor that encodes other data
_OTHERWISE = ", or, if it is a buffer that is recomputed, register it with persistent=False"

_LARGEST = 1 << 30  # bytes; the limit for a tree's JSON
_NUMPY_KINDS = "biufcmMSU"  # numbers, dates, fixed-length text
_FACTORIES: dict[str, type | None] = {
    "None": None,
    **{factory.__name__: factory for factory in (bool, int, float, str, list, dict, set, tuple)},
}


class _Tensors(dict[str, torch.Tensor]):
    """The tensors of a tree by name.

    Attributes:
        shards: Stores or reads sharded tensors: a `Shards` or `ShardReader` of
            `trainer.checkpoint.sharded_state`; None if there are none.
    """

    shards: Any = None


def save_tree(tree: object, directory: Path, stem: str) -> None:
    """Write a tree as ``<stem>.json`` and, if it holds tensors, ``<stem>.safetensors``.

    Args:
        tree: Nested dicts, lists, tuples, sets and their variants in :mod:`collections` with
            tensors, numpy arrays, numbers, strings, bytes, dtypes, devices and sizes as leaves.
        directory: An existing folder.
        stem: The files' name before the dot.

    Raises:
        TypeError: If the tree holds anything else; the message says where and what to save instead.
    """
    document, tensors = encode_tree(tree, stem)
    write_tree(document, tensors, directory, stem)


def encode_tree(tree: object, stem: str, shards: Any = None) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the JSON that :func:`save_tree` writes, and the tensors that it names.

    The tensors may share memory with the tree's tensors, and are on the same devices.

    Args:
        tree: The tree.
        stem: The files' name before the dot.
        shards: Collects the tree's sharded tensors, see `trainer.checkpoint.sharded_state`.

    Raises:
        TypeError: See :func:`save_tree`.
    """
    tensors = _Tensors()
    tensors.shards = shards
    encoded = _encode(tree, _KeyPath(stem, ()), tensors)
    file = f"{stem}.safetensors" if tensors else None
    document = json.dumps({"tensors": file, "tree": encoded}, allow_nan=False)
    if len(document) > _LARGEST:
        raise TypeError(
            f"{stem} has {len(document):,} bytes without its tensors and arrays; the limit is "
            f"{_LARGEST:,}. Save large lists as tensors or arrays."
        )
    return document, tensors


def write_tree(
    document: str, tensors: Mapping[str, torch.Tensor], directory: Path, stem: str
) -> None:
    """Write an encoded tree."""
    (directory / f"{stem}.json").write_text(document, encoding="utf-8")
    if tensors:
        write_tensors(tensors, directory / f"{stem}.safetensors")


def load_tree(
    directory: Path,
    stem: str,
    files: Container[str] | None = None,
    shards: Any = None,
    read: Callable[[Path], Mapping[str, Any]] | None = None,
) -> Any:
    """Load a tree that :func:`save_tree` wrote, with its tensors on the CPU.

    Args:
        directory: The folder.
        stem: The files' name before the dot.
        files: The names of the files that may be read; None if all may.
        shards: Provides the tree's sharded tensors, see `trainer.checkpoint.sharded_state`.
        read: Reads the file of tensors; None reads whole tensors.

    Raises:
        CheckpointError: If a file is missing or cannot be read; the message names it.
    """
    file = directory / f"{stem}.json"
    with reading(file):
        if files is not None and file.name not in files:
            raise CheckpointError(f"{file} is not in the checkpoint's manifest.")
        document = read_json(file, _LARGEST)
        named, tree = document["tensors"], document["tree"]
        name = f"{stem}.safetensors"
        if named not in (None, name) or (named and files is not None and name not in files):
            raise CheckpointError(f"{file} points to tensors in {named!r}, not in {name!r}.")
        read = read or (lambda file: read_tensors(file)[0])
        tensors = _Tensors(read(directory / name) if named else {})
        tensors.shards = shards
        return decode_tree(tree, tensors)


def portable(tensor: torch.Tensor, where: object, otherwise: str = "") -> torch.Tensor:
    """Return a plain, contiguous tensor that safetensors can store, copied if needed.

    Args:
        tensor: The tensor.
        where: Its name in an error message.
        otherwise: Further advice, for the end of the message.

    Raises:
        TypeError: If it is of a subclass, has no data, is sparse, or has an unsupported dtype.
    """
    if type(tensor) not in PLAIN:  # every tensor passes here before it is written
        fix = "save the result of its full_tensor() (if it is sharded) or dequantize()"
    elif tensor.layout != torch.strided:
        fix = "save its to_dense()"
    elif tensor.device.type == "meta":
        fix = "give it data with to_empty() or by loading weights"
    elif tensor.dtype not in DTYPES:
        fix = "convert it, complex numbers with torch.view_as_real"
    else:
        return dense(tensor)
    raise TypeError(
        f"{where} cannot be saved: it is a {type(tensor).__name__} of dtype {tensor.dtype}, layout "
        f"{tensor.layout} on {tensor.device}. Only plain dense tensors can be saved; {fix}"
        f"{otherwise}."
    )


def portable_weight(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a weight as `portable` does.

    Raises:
        TypeError: See `portable`.
    """
    return portable(tensor, f"The weight {name!r}", _OTHERWISE)


def check_weight(name: str, value: object) -> None:
    """Check without a copy that a weight, or a result of ``get_extra_state``, can be saved.

    Only plain tensors are checked: an engine may convert others before saving.

    Raises:
        TypeError: It cannot be saved.
    """
    if not isinstance(value, torch.Tensor):
        extra_state_tensor(name, value)
    elif type(value) in PLAIN and not value.is_meta and not is_lazy(value):
        strided = value.layout == torch.strided
        portable_weight(value.new_empty(0) if strided else value, name)


def extra_state_tensor(name: str, value: object) -> torch.Tensor:
    """Encode a result of ``get_extra_state`` that is no tensor as bytes in a uint8 tensor.

    Args:
        name: Its key in the state dict.
        value: Nested plain data and tensors, see :func:`save_tree`.

    Raises:
        TypeError: The key is not one of ``get_extra_state``, or the value cannot be saved.
    """
    from safetensors.torch import save

    if not name.endswith(EXTRA_STATE):
        raise TypeError(f"The weight {name!r} is a {type(value).__name__}, not a tensor.")
    document, tensors = encode_tree(value, name)
    text = document.encode()
    data = _MARK + struct.pack("<Q", len(text)) + text
    if tensors:
        data += save({key: tensor.detach().cpu().clone() for key, tensor in tensors.items()})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def extra_state(tensor: Any) -> Any:
    """Decode a tensor of `extra_state_tensor`; return any other value unchanged.

    Raises:
        CheckpointError: The tensor is damaged.
    """
    from safetensors.torch import load

    if not (isinstance(tensor, torch.Tensor) and tensor.dtype == torch.uint8 and tensor.dim() == 1):
        return tensor
    data = tensor.cpu().numpy().tobytes()
    if not data.startswith(_MARK):
        return tensor
    with reading("An extra state"):
        begin = len(_MARK) + 8
        end = begin + struct.unpack("<Q", data[len(_MARK) : begin])[0]
        document = json.loads(data[begin:end])
        return decode_tree(document["tree"], load(data[end:]) if data[end:] else {})


def write_tensors(
    tensors: Mapping[str, torch.Tensor], file: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write portable tensors to one safetensors file; shared memory is written once per tensor.

    The file gets the default mode of new files; safetensors alone would restrict it to its owner.

    Raises:
        OSError: If writing fails.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    separate: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        host = tensor.cpu()
        storage = host.untyped_storage().data_ptr()
        separate[name] = host.clone() if storage in seen else host
        seen.add(storage)
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(separate, file, metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else EIO, str(error), str(file)) from error
    file.chmod(mode)


def stream_tensors(
    described: Mapping[str, Any], values: Iterable[torch.Tensor], file: Path, metadata: Any = None
) -> None:
    """Write one safetensors file tensor by tensor, so that only one is in memory at a time.

    Args:
        described: Anything with the ``shape`` and ``dtype`` of each tensor, by name, in the order
            of :func:`aligned`.
        values: The tensors in that order.
        file: The file.
        metadata: Strings by name.

    Raises:
        TypeError: A tensor is not a plain dense one with data, or safetensors lacks its dtype.
        OSError: If writing fails.
    """
    with open(file, "wb") as stream:
        write_header(stream, described, metadata)
        tensors = iter(values)  # zip would keep a tensor while the next one is made
        for name in described:
            host = portable_weight(next(tensors).detach(), name).cpu()
            stream.write(as_bytes(host).numpy().data)  # tofile would lose the errno
            del host


def write_header(stream: BinaryIO, described: Mapping[str, Any], metadata: Any = None) -> None:
    """Write the header of a safetensors file (https://github.com/huggingface/safetensors#format).

    The bytes of the tensors follow it without gaps. The arguments are those of `stream_tensors`.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in described.items():
        start, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {"dtype": _dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        header[name]["data_offsets"] = [start, end]
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % 64)  # a mapped file's first tensor then aligns as in memory
    stream.write(struct.pack("<Q", len(text)) + text)


def aligned(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors in file order: wide dtypes first, so that all are aligned.

    Args:
        described: Anything with ``dtype``, by name.
    """
    return dict(sorted(described.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in safetensors files."""
    from safetensors.torch import save

    if dtype not in DTYPES or dtype == torch.float4_e2m1fn_x2:  # its shape counts pairs of values
        raise TypeError(f"Weights of dtype {dtype} cannot be streamed to a safetensors file.")
    raw = save({"value": torch.empty(0, dtype=dtype)})
    return str(json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])["value"]["dtype"])


@cache
def dtypes_by_name() -> dict[str, torch.dtype]:
    """Return the dtypes by their names in safetensors files."""
    return {_dtype_name(dtype): dtype for dtype in DTYPES if dtype != torch.float4_e2m1fn_x2}


def read_tensors(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read the tensors of a safetensors file to the CPU, and its metadata.

    Raises:
        CheckpointError: If the file is missing or damaged; the message names it.
    """
    from safetensors import safe_open

    check_file(file)
    with reading(file), safe_open(file, framework="pt") as opened:
        # safe_open's tensors are memory-mapped. If the checkpoint is removed meanwhile, they keep
        # its space in use on a local disk, and kill the process (SIGBUS) on a network disk.
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
        return tensors, dict(opened.metadata() or {})


class _KeyPath:
    """The position of a value in a tree, as a Python expression and as a tensor's name."""

    def __init__(self, stem: str, keys: tuple[object, ...]) -> None:
        self.stem, self.keys = stem, keys

    def __str__(self) -> str:
        return self.stem + "".join(f"[{key!r}]" for key in self.keys)

    def __truediv__(self, key: object) -> _KeyPath:
        return _KeyPath(self.stem, (*self.keys, key))

    def name(self) -> str:
        return ".".join(map(str, self.keys)) or "value"


def _encode(value: Any, path: _KeyPath, tensors: _Tensors) -> Any:
    kind = type(value)
    if kind in _LEAVES:
        return _LEAVES[kind](value)
    return _CONTAINERS.get(kind, _encode_other)(value, path, tensors)


def _encode_float(value: float) -> Any:
    if math.isfinite(value):
        return value  # json writes text that parses to the same number
    return {"$": "float", "bits": struct.pack("<d", value).hex()}


def _encode_int(value: int) -> Any:
    return value if fits_64_bits(value) else {"$": "int", "hex": hex(value)}


def _encode_str(value: str) -> Any:
    if is_unicode(value):
        return value
    return {"$": "str", "hex": value.encode("utf-8", "surrogatepass").hex()}


def _encode_list(value: Iterable[Any], path: _KeyPath, tensors: _Tensors) -> list[Any]:
    return [_encode(item, path / index, tensors) for index, item in enumerate(value)]


def _encode_items(value: Mapping[Any, Any], path: _KeyPath, tensors: _Tensors) -> list[Any]:
    return [
        [_encode(key, path / key, tensors), _encode(item, path / key, tensors)]
        for key, item in value.items()
    ]


def _encode_mapping(value: Mapping[Any, Any], path: _KeyPath, tensors: _Tensors) -> Any:
    return {"$": type(value).__name__, "items": _encode_items(value, path, tensors)}


def _encode_dict(value: dict[Any, Any], path: _KeyPath, tensors: _Tensors) -> Any:
    if all(type(key) is str and is_unicode(key) for key in value) and "$" not in value:
        return {key: _encode(item, path / key, tensors) for key, item in value.items()}
    return _encode_mapping(value, path, tensors)


def _encode_defaultdict(value: defaultdict[Any, Any], path: _KeyPath, tensors: _Tensors) -> Any:
    names = [name for name, factory in _FACTORIES.items() if factory is value.default_factory]
    if not names:
        raise TypeError(
            f"{path} is a defaultdict of {value.default_factory!r}, which cannot be saved; "
            f"supported factories are {', '.join(_FACTORIES)}. Save dict(…) of it."
        )
    return {**_encode_mapping(value, path, tensors), "factory": names[0]}


def _encode_tuple(value: tuple[Any, ...], path: _KeyPath, tensors: _Tensors) -> Any:
    return {"$": "tuple", "items": _encode_list(value, path, tensors)}


def _encode_set(value: Iterable[Any], path: _KeyPath, tensors: _Tensors) -> Any:
    items = [_encode(item, path, tensors) for item in value]
    # Sorted, so that equal sets are written as equal files.
    return {"$": type(value).__name__, "items": sorted(items, key=json.dumps)}


def _encode_tensor(value: Any, path: _KeyPath, tensors: _Tensors) -> Any:
    name = path.name().encode(errors="backslashreplace").decode()
    if tensors.shards is not None and is_sharded(value):
        return {"$": "sharded", "name": tensors.shards.add(f"{path.stem}/{name}", value)}
    while name in tensors or name == "__metadata__":  # keys 0 and "0"; a name safetensors reserves
        name = f"{name}#{len(tensors)}"
    tensors[name] = stored = portable(value, path)
    # Keep a dense memory format such as channels_last, because it affects the rounding of sums.
    strides = torch.empty_like(value, device="meta").stride()
    if strides == stored.stride():
        return {"$": "tensor", "name": name}
    return {"$": "tensor", "name": name, "strides": list(strides)}


def _encode_other(value: Any, path: _KeyPath, tensors: _Tensors) -> Any:
    import numpy as np

    if isinstance(value, (torch.Tensor, LocalShards)):
        return _encode_tensor(value, path, tensors)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        document = {"$": "namedtuple", "name": type(value).__name__, "fields": value._fields}
        return {**document, "items": _encode_list(value, path, tensors)}
    if isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS:
        return {"$": "scalar", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
    if type(value) is np.ndarray and value.dtype.kind in _NUMPY_KINDS:
        # Stored as uint8, because numpy has dtypes that safetensors does not support.
        flat = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
        document = {"$": "ndarray", "dtype": value.dtype.str, "shape": value.shape}
        return {**document, "data": _encode_tensor(flat, path, tensors)}
    raise TypeError(_refusal(value, path))


def _refusal(value: object, path: _KeyPath) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if hasattr(value, "state_dict"):
        fix = "Save its state_dict()"
    elif base := [cls for cls in (str, int, float, list, dict) if isinstance(value, cls)]:
        fix = f"Save {base[0].__name__}(…) of it"
    else:
        fix = "Save plain values from which it can be recreated, or leave it out of the state"
    return (
        f"{path} is a {kind}, which cannot be saved: checkpoints hold tensors, numpy arrays, "
        f"numbers, strings, bytes, dtypes and containers of them. {fix}."
    )


_LEAVES: dict[type, Callable[[Any], Any]] = {
    **dict.fromkeys((type(None), bool), lambda value: value),
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    bytes: lambda value: {"$": "bytes", "base64": base64.b64encode(value).decode()},
    torch.dtype: lambda value: {"$": "dtype", "name": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"$": "device", "name": str(value)},
    torch.Size: lambda value: {"$": "Size", "items": list(value)},
}

_CONTAINERS: dict[type, Callable[[Any, _KeyPath, _Tensors], Any]] = {
    dict: _encode_dict,
    OrderedDict: _encode_mapping,
    Counter: _encode_mapping,
    defaultdict: _encode_defaultdict,
    list: _encode_list,
    tuple: _encode_tuple,
    set: _encode_set,
    frozenset: _encode_set,
    torch.Tensor: _encode_tensor,
}


def decode_tree(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the tree that a document's JSON and its tensors represent.

    Raises:
        ValueError: If they are malformed, or were written by a later release.
    """
    try:
        return _decode(value, tensors)
    except Exception as error:  # any type, since malformed data can raise anything
        raise ValueError(f"it does not fit its tensors or this release: {error!r}") from error


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: _decode(item, tensors) for key, item in value.items()}
    fields = dict(value)
    decoder = _DECODERS[fields.pop("$")]
    if "items" in fields:
        fields["items"] = _decode(fields["items"], tensors)
    return decoder(tensors, **fields)


def _decode_tensor(
    tensors: Mapping[str, torch.Tensor], name: str, strides: list[int] | None = None
) -> torch.Tensor:
    stored = tensors[name]
    if strides is None:
        return stored
    form = torch.empty_strided(stored.shape, strides, dtype=stored.dtype, device="meta")
    if form.untyped_storage().nbytes() > stored.nbytes:
        raise ValueError(f"strides of {strides} are not dense in {tuple(stored.shape)}")
    return torch.empty_strided(stored.shape, strides, dtype=stored.dtype).copy_(stored)


def _decode_ndarray(
    tensors: Mapping[str, torch.Tensor], dtype: str, shape: list[int], data: Any
) -> Any:
    stored = torch.clone(_decode(data, tensors))
    return stored.numpy().view(_numpy_dtype(dtype)).reshape(shape)


def _decode_scalar(_: object, dtype: str, **fields: str) -> Any:
    import numpy as np

    return np.frombuffer(bytes.fromhex(fields["hex"]), _numpy_dtype(dtype))[0]


def _numpy_dtype(name: str) -> Any:
    import numpy as np

    if (dtype := np.dtype(name)).kind not in _NUMPY_KINDS:
        raise ValueError(f"arrays of {name!r} are not saved")
    return dtype


def _decode_dtype(_: object, name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return dtype


def _decode_namedtuple(_: object, name: str, fields: list[str], items: list[Any]) -> Any:
    return namedtuple(name, fields, rename=True)(*items)  # rename=True allows fields such as `_0`


_DECODERS: dict[str, Callable[..., Any]] = {
    "float": lambda _, bits: struct.unpack("<d", bytes.fromhex(bits))[0],
    "int": lambda _, **fields: int(fields["hex"], 16),
    "str": lambda _, **fields: bytes.fromhex(fields["hex"]).decode("utf-8", "surrogatepass"),
    "bytes": lambda _, **fields: base64.b64decode(fields["base64"], validate=True),
    "tuple": lambda _, items: tuple(items),
    "dict": lambda _, items: dict(items),
    "OrderedDict": lambda _, items: OrderedDict(items),
    "Counter": lambda _, items: Counter(dict(items)),
    "defaultdict": lambda _, factory, items: defaultdict(_FACTORIES[factory], items),
    "set": lambda _, items: set(items),
    "frozenset": lambda _, items: frozenset(items),
    "namedtuple": _decode_namedtuple,
    "tensor": _decode_tensor,
    "sharded": lambda tensors, name: tensors.shards.tensor(name),
    "ndarray": _decode_ndarray,
    "scalar": _decode_scalar,
    "dtype": _decode_dtype,
    "device": lambda _, name: torch.device(name),
    "Size": lambda _, items: torch.Size(items),
}
