"""Nested containers of tensors (trees): map a function, find the batch size, move to a device.

A tree is a list, tuple, named tuple, mapping or dataclass instance of trees, or a leaf. Tensors and
all other objects are leaves.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from trainer import xla


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of a tree with `function` applied to every leaf.

    Containers keep their classes and attributes. A ``PackedSequence`` is not a leaf here:
    `function` is applied to its data and indices.

    Args:
        function: Called with a leaf; returns its replacement.
        tree: The nested containers; they are not changed. See `rebuild` for how they are copied.
    """
    if isinstance(tree, PackedSequence):  # torch needs batch_sizes on the host
        indices = map(function, (tree.sorted_indices, tree.unsorted_indices))
        return PackedSequence(function(tree.data), tree.batch_sizes, *indices)
    parts = children(tree)
    if parts is None:
        return function(tree)
    return rebuild(tree, [map_tree(function, value) for _, value in parts])


def children(tree: Any) -> list[tuple[Any, Any]] | None:
    """Return a container's items as (key, field or index; value) pairs; None for a leaf."""
    if isinstance(tree, (Tensor, PackedSequence, type)):
        return None
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a named tuple
        return list(zip(tree._fields, tree, strict=True))
    if isinstance(tree, (list, tuple)):
        return list(enumerate(tree))
    if is_dataclass(tree):
        names = [field.name for field in fields(tree)]
        return [(name, getattr(tree, name)) for name in names if hasattr(tree, name)]
    return None


def rebuild(like: Any, values: Sequence[Any]) -> Any:
    """Return a copy of the container `like`, with `values` in place of its `children`.

    The copy has the same class and attributes. The constructor of a user's class may take other
    arguments, so it is called only if there is no other way to store the values.

    Args:
        like: The container.
        values: The new values, in the order of `children`.
    """
    kind: Any = type(like)
    if kind in (list, tuple):
        return kind(values)
    if isinstance(like, Mapping):
        items = dict(zip(like.keys(), values, strict=True))  # iterating a TensorDict yields rows
        return items if kind is dict else _rebuild_mapping(like, items)
    if isinstance(like, tuple):
        if hasattr(like, "__dict__"):
            return _copy_attributes(like, tuple.__new__(kind, values))
        return like._make(values) if hasattr(like, "_make") else kind(values)
    if isinstance(like, list):
        made: Any = _copy_attributes(like, kind.__new__(kind))
        list.extend(made, values)
        return made
    made = _copy_attributes(like, object.__new__(kind))
    for (name, _), value in zip(children(like) or (), values, strict=True):
        object.__setattr__(made, name, value)  # setattr fails for a frozen dataclass
    return made


def _rebuild_mapping(like: Any, items: dict[Any, Any]) -> Any:
    kind: Any = type(like)
    if isinstance(like, dict):
        made = _copy_attributes(like, kind.__new__(kind))
    else:
        store = _store(like)
        if store is None:
            return kind(items)
        made = _copy_attributes(like, object.__new__(kind))
        object.__setattr__(made, store, rebuild(getattr(like, store), list(items.values())))
    if isinstance(like, MutableMapping):
        try:
            for key, value in items.items():
                made[key] = value  # the class may also store the value as an attribute
        except (TypeError, RuntimeError):  # read-only, or a TensorDict whose shapes changed
            return kind(items)
    return made


def _store(mapping: Any) -> str | None:
    """Return the attribute in which a mapping other than a dict stores its items, or None."""
    values = [value for _, value in mapping.items()]
    names: list[str] = [*getattr(mapping, "__dict__", ()), *_slots(type(mapping))]
    for name in names:
        held = getattr(mapping, name, None)
        if isinstance(held, Mapping) and len(held) == len(values):
            same = (one is other for (_, one), other in zip(held.items(), values, strict=True))
            if all(same):
                return name
    return None


def _copy_attributes(like: Any, made: Any) -> Any:
    """Copy the attributes and slots of `like` to the new object `made`, and return it."""
    if getattr(like, "__dict__", None) is like:  # a dict whose items are its attributes
        made.__dict__ = made
    elif hasattr(like, "__dict__"):
        vars(made).update(vars(like))
    for name in _slots(type(like)):
        if hasattr(like, name):
            object.__setattr__(made, name, getattr(like, name))
    return made


def _slots(kind: type) -> list[str]:
    return [
        name
        for base in kind.__mro__
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    ]


def leaves(tree: Any) -> Iterator[Any]:
    """Yield all leaves of a tree in order; here a ``PackedSequence`` is one leaf."""
    parts = children(tree)
    if parts is None:
        yield tree
    else:
        for _, value in parts:
            yield from leaves(value)


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Move every tensor of a tree, and every other object with a ``.to`` method, to `device`.

    A container with its own ``.to`` (a tokenizer's encoding or a dataclass, for example) is moved
    by calling it, unless the container has one of `skip_keys`.

    Args:
        tensor: The nested containers; they are not changed.
        device: The target device.
        non_blocking: Do not wait for copies from pinned memory; default False. It is passed to
            every ``.to`` method that accepts it. Copies to MPS are always waited for, since torch
            might read the memory of a freed tensor.
        skip_keys: Keys of mappings and fields of dataclasses whose values are not moved, at any
            depth.
    """
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())
    kind = torch.device(device).type
    non_blocking = non_blocking and kind != "mps"
    shards = kind == "xla" and xla.spmd()

    def send(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            moved = tree.to(device, non_blocking=non_blocking)
            return xla.shard(moved) if shards else moved
        if type(tree) is list and not skipped:  # fast path: loaders yield lists
            return [send(value) for value in tree]
        parts = children(tree)
        keeps = bool(skipped and parts and any(key in skipped for key, _ in parts))
        owner = tree if parts is None else type(tree)  # a mapping may expose a key "to" as .to
        if not keeps and not isinstance(tree, type) and callable(getattr(owner, "to", None)):
            return _send_by_itself(tree, device, non_blocking=non_blocking)
        if parts is None:
            return tree
        return rebuild(tree, [value if key in skipped else send(value) for key, value in parts])

    return send(tensor)


to_device = send_to_device


def _send_by_itself(thing: Any, device: torch.device | str | int, *, non_blocking: bool) -> Any:
    moved = (
        thing.to(device, non_blocking=True)
        if non_blocking and _takes(thing.to, "non_blocking")
        else thing.to(device)
    )
    return thing if moved is None else moved  # some objects move in place and return None


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a built-in without a signature
        return True
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is plain dense host memory and does not require gradients."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_quantized)
    )


def dense(tensor: Tensor) -> Tensor:
    """Return a detached, contiguous tensor with the same values, sharing memory if possible.

    Lazy conjugation and negation are resolved. Tensors are sent and written in this form.
    """
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A dimension of size 1 may have any stride; torch then refuses to view the values as bytes.
    return values.as_strided((values.numel(),), (1,)).view(values.shape)


def as_bytes(tensor: Tensor) -> Tensor:
    """View a dense tensor as a uint8 tensor of shape (bytes,)."""
    return tensor.reshape(-1).view(torch.uint8)


class LocalShards:
    """This process's parts of a tensor that is not sharded as a ``DTensor``.

    Args:
        shape: The shape of the whole tensor.
        dtype: Its dtype.
        device: The device on which `full_tensor` gathers it.
        shards: The offsets of each part in the whole tensor, and its values.
        saved: Whether this process saves them; of several processes with the same parts, one does.
    """

    layout = torch.strided

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        shards: Sequence[tuple[list[int], Tensor]] = (),
        *,
        saved: bool = True,
    ) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device
        self.shards, self.saved = shards, saved

    def numel(self) -> int:
        """Return the number of values of the whole tensor."""
        return self.shape.numel()

    def detach(self) -> LocalShards:
        """Return itself, since its values have no graph."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise when pickled, for example by ``torch.save``: a part alone is of no use.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "This is only what one process holds of a tensor: call its full_tensor() on all "
            "processes before it is pickled, or save with save_state, which writes all parts."
        )

    def full_tensor(self) -> Tensor:
        """Return the whole tensor on all processes; collective."""
        whole = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for offsets, values in self.shards if self.saved else ():
            region_of(whole, offsets, values.shape).copy_(values)
        if whole.numel():
            torch.distributed.all_reduce(as_bytes(whole))  # summed as bytes: exact for any dtype
        return whole


def shards_of_range(
    shape: Sequence[int], values: Tensor, start: int
) -> list[tuple[list[int], Tensor]]:
    """Return consecutive values of a flattened tensor as parts of the tensor (views with offsets).

    Whole rows are one part; values before and after them are divided recursively.

    Args:
        shape: The shape of the whole tensor.
        values: The values, a tensor of one dimension.
        start: The index of the first one in the flattened tensor.
    """
    count = values.numel()
    if not shape or not count:
        return [([], values.view(()))] if count else []
    width = math.prod(shape[1:])
    first, last = -(-start // width), (start + count) // width  # of the whole rows
    head = min(first * width - start, count)
    rows = max(last - first, 0)
    parts = []
    for row, part, at in (
        (first - 1, values[:head], start - (first - 1) * width),
        (last, values[head + rows * width :], 0),
    ):
        inner = shards_of_range(shape[1:], part, at)
        parts += [([row, *offsets], value[None]) for offsets, value in inner]
    if rows:
        middle = values[head : head + rows * width].view(rows, *shape[1:])
        parts.insert(0, ([first] + [0] * (len(shape) - 1), middle))
    return parts


def is_sharded(value: object) -> bool:
    """Return whether a value is a tensor that is split over processes."""
    return isinstance(value, LocalShards) or (
        isinstance(value, Tensor) and hasattr(value, "device_mesh")
    )


def local_parts(tensor: Any) -> Sequence[tuple[list[int], Tensor]]:
    """Return the offsets and the values of this process's parts of a tensor, in the same memory."""
    if isinstance(tensor, LocalShards):
        return tensor.shards
    return [local_part(tensor) if is_sharded(tensor) else ([0] * tensor.ndim, tensor)]


def local_part(tensor: Any) -> tuple[list[int], Tensor]:
    """Return the offsets and the values of this process's part of a ``DTensor``.

    The mesh dimensions split a tensor in turn, each like ``torch.chunk``. A dimension that FSDP
    splits after tensor parallelism (``_StridedShard``) comes last. Torch's
    ``__create_chunk_list__`` is wrong for some sizes that are split by both and divisible by
    neither, such as 9 rows on 4 x 2 processes.
    """
    local = part_here(tensor)
    mesh = tensor.device_mesh
    where = mesh.get_coordinate()
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    splits = [
        (n, placement) for n, placement in enumerate(tensor.placements) if hasattr(placement, "dim")
    ]
    for number, split in sorted(
        splits, key=lambda placement: hasattr(placement[1], "split_factor")
    ):
        step = -(-sizes[split.dim] // mesh.size(number))
        start = min(step * where[number], sizes[split.dim])
        offsets[split.dim] += start
        sizes[split.dim] = min(step, sizes[split.dim] - start)
    assert sizes == list(local.shape), (sizes, local.shape, tensor.placements)
    return offsets, local


def region_of(tensor: Any, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return a region of a tensor, as a view."""
    region: Tensor = tensor[tuple(slice(o, o + s) for o, s in zip(offsets, shape, strict=True))]
    return region


def fill_(target: Any, source: Any) -> None:
    """Copy a tensor into another one, which may be sharded even if the first is whole."""
    if isinstance(source, LocalShards):  # divided like the target
        for (_, local), (_, values) in zip(local_parts(target), source.shards, strict=True):
            local.copy_(values)
        return
    if not is_sharded(target) or is_sharded(source):
        target.copy_(source)
        return
    for offsets, local in local_parts(target):
        if local.numel():
            local.copy_(region_of(source, offsets, local.shape))


@torch.no_grad()
def part_here(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor, in the same memory; others unchanged."""
    part: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if hasattr(part, "fsdp_pre_all_gather"):  # torchao's wrapper around a plain tensor
        part = getattr(part, part.__tensor_flatten__()[0][0])
    whole: Tensor = part
    return whole


def gathered(tensor: Any) -> Tensor:
    """Return the whole tensor on all processes; collective for a sharded one."""
    if not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]  # a plain tensor
    # Torch warns that sums over two dimensions of a mesh are rounded; but nothing is summed here.
    log = logging.getLogger("torch.distributed.tensor._redistribute")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        whole: Tensor = tensor.full_tensor()
    finally:
        log.setLevel(level)
    return whole


def own_memory(module: nn.Module) -> None:
    """Copy expanded parameters and buffers, whose elements share memory and cannot be loaded."""
    for tensor in chain(module.parameters(), module.buffers()):
        if not is_lazy(tensor) and tensor.layout == torch.strided and 0 in tensor.stride():
            tensor.data = tensor.data.clone()


def detach(tree: Any) -> Any:
    """Return the tree with every tensor detached."""
    if isinstance(tree, Tensor):  # fast path, because most steps return one tensor
        return tree.detach()
    return map_tree(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def to_host(tree: Any) -> Any:
    """Return the tree with every tensor detached and copied to host memory."""
    return map_tree(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, tree)


def start_copy_to_host(tensor: Tensor) -> tuple[Tensor, Any]:
    """Start to copy a tensor on an accelerator to host memory.

    Returns:
        The copy, and an event; wait for the event before reading the values.
    """
    # Into pageable memory, CUDA would make the host wait.
    pinned = tensor.device.type in ("cuda", "xpu")
    if tensor.device.type == "xla":
        return xla.start_copy_to_host(tensor)
    host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    host.copy_(tensor, non_blocking=True)
    return host, record_event(tensor.device)


def record_event(device: torch.device, *, enable_timing: bool = False) -> Any:
    """Record an event after the work in the current stream of a device, and return it.

    ``torch.Event(device).record()`` would take the current stream of the current device.
    """
    event = torch.Event(device, enable_timing=enable_timing)
    event.record(torch.accelerator.current_stream(device))
    return event


def convert_to_fp32(tensor: Any) -> Any:
    """Return the tree with its float16 and bfloat16 tensors converted to float32."""
    half = (torch.float16, torch.bfloat16)
    return map_tree(
        lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in half else leaf,
        tensor,
    )


def slice_tensors(
    data: Any,
    tensor_slice: Any,
    process_index: int | None = None,
    num_processes: int | None = None,
) -> Any:
    """Slice every tensor of a tree along its first dimension.

    It can be used as the ``slice_fn_for_dispatch`` of a prepared loader.

    Args:
        data: The tree. 0-d tensors, and leaves that are not tensors, are not sliced.
        tensor_slice: A slice, or any other index of a tensor.
        process_index: Ignored; passed to ``slice_fn_for_dispatch`` functions.
        num_processes: Ignored; passed to ``slice_fn_for_dispatch`` functions.
    """
    del process_index, num_processes
    return map_tree(
        lambda leaf: leaf[tensor_slice] if isinstance(leaf, Tensor) and leaf.ndim else leaf, data
    )


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate the tensors of trees of the same structure along a dimension.

    Args:
        data: The trees, at least one; their leaves are tensors with at least one dimension.
        dim: The dimension along which to concatenate; default 0.

    Raises:
        TypeError: A leaf is not a tensor.
        ValueError: The trees differ in structure.
    """
    if all(isinstance(tree, Tensor) for tree in data):
        return torch.cat(list(data), dim=dim)
    parts = [children(tree) for tree in data]
    if any(part is None for part in parts):
        met = ", ".join(sorted({type(tree).__name__ for tree in data}))
        raise TypeError(
            f"concatenate joins tensors in containers of the same structure; it found {met}."
        )
    tables = [dict(part or ()) for part in parts]
    first = tables[0]
    if any(table.keys() != first.keys() for table in tables):
        keys = " and ".join(dict.fromkeys(str(list(table)) for table in tables))
        raise ValueError(f"concatenate got trees of different structure: {keys}.")
    return rebuild(data[0], [concatenate([table[key] for table in tables], dim) for key in first])


def required_batch_size(data: Any) -> int:
    """Return the length of the first dimension of the first tensor that has one.

    Args:
        data: Tensors in nested containers.

    Raises:
        ValueError: The containers are empty, or their tensors have no dimensions.
        TypeError: The containers hold no tensor.
    """
    size = find_batch_size(data)
    if size is not None:
        return size
    tensors = list(leaves(data))
    if not tensors:
        raise ValueError(f"Cannot find the batch size from an empty {type(data).__name__}.")
    if not any(isinstance(leaf, Tensor) for leaf in tensors):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in tensors}))
        raise TypeError(f"find_batch_size needs a tensor, but found only {kinds}.")
    raise ValueError(
        "Cannot find the batch size: no tensor has a dimension. Give tensors whose first dimension "
        "counts the samples."
    )


def find_batch_size(tree: Any) -> int | None:
    """Like `required_batch_size`, but return None if there is no batch size."""
    first = tree[0] if type(tree) in (list, tuple) and tree else tree
    if type(first) is Tensor and first.ndim > 0:  # fast path: most batches
        return len(first)
    for leaf in leaves(tree):
        if isinstance(leaf, PackedSequence):
            return int(leaf.batch_sizes[0])  # every sequence has a first step
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return leaf.shape[0]
    return None


def count_samples(tree: Any, fetched: int | None = None) -> int | None:
    """Return the number of samples in a batch; None if unknown.

    It is the first dimension of its tensors. If these differ, for example in batches of images with
    their boxes, it is the number of samples that were fetched, or the length of the list with one
    tensor, or one container of tensors, per sample.

    Args:
        tree: The batch.
        fetched: The number of samples passed to ``collate_fn``, which may have dropped some; None
            if unknown.
    """
    first = tree[0] if type(tree) in (list, tuple) and tree else tree
    if type(first) is Tensor and first.ndim > 0 and len(first) == fetched:
        return fetched  # fast path
    values = list(leaves(tree))
    for leaf in values:
        if isinstance(leaf, PackedSequence):
            return int(leaf.batch_sizes[0])  # every sequence has a first step
    tensors = [leaf for leaf in values if isinstance(leaf, Tensor) and leaf.ndim > 0]
    if not tensors:
        return fetched
    rows = {len(tensor) for tensor in tensors}
    if fetched is not None:
        lists = _lists_of_samples(tree, known=True)
        if fetched in rows | lists or min(rows) > fetched:  # more: concatenated graphs
            return fetched
        if len(rows) == 1:
            return rows.pop()
        fewer = {length for length in lists if 2 < length < fetched}
        return fewer.pop() if len(fewer) == 1 else fetched
    lists = _lists_of_samples(tree, known=False)
    if len(rows) > 1 and len(lists) == 1:
        return lists.pop()
    # A tensor without rows is a part of one sample, such as the boxes of an image without objects.
    return len(tensors[0]) or (0 if len(rows) == 1 else None)


def _lists_of_samples(tree: Any, *, known: bool, nested: bool = False) -> set[int]:
    """Return the lengths of lists in a batch that may have one item per sample.

    They contain dicts, or tensors of one dtype that differ only in their lengths. Other lists, and
    dicts in the outermost list, could also be fields of a batch; they count only if the number of
    samples is known.

    Args:
        tree: The batch.
        known: Whether the number of samples is known, so that lists of this length can be
            recognised.
        nested: Whether the tree is inside another one.
    """
    items = [value for _, value in children(tree) or []]
    lengths: set[int] = set()
    if type(tree) in (list, tuple) and items:
        if all(isinstance(item, Tensor) and item.ndim > 0 for item in items):
            kinds = {(item.dtype, item.ndim if known else item.shape[1:]) for item in items}
            differ = known or len(set(map(len, items))) > 1
            if len(kinds) == 1 and differ and (known or nested or len(items) > 2):
                lengths.add(len(items))  # two items may be a source and a target
        elif (known or nested) and all(isinstance(item, Mapping) for item in items):
            lengths.add(len(items))
    for item in items:
        lengths |= _lists_of_samples(item, known=known, nested=True)
    return lengths
