"""Collectives over Python objects, which are pickled; every process must call each function."""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from itertools import chain
from typing import Any

import numpy
import torch
from torch import Tensor

from trainer.distributed import guards, transport
from trainer.distributed.collectives import check_rank
from trainer.distributed.guards import check_collective
from trainer.state import PartialState

_ARRAYS = (Tensor, numpy.ndarray)
_SEQUENCES = (list, tuple, range, deque, Set)


def gather_object(object: Any) -> list[Any]:  # noqa: A002 - the documented API's name
    """Gather the objects of all processes into one list, in the order of the ranks.

    A list, tuple, range, deque or set contributes its elements; so does a tensor or array with at
    least one dimension. Any other object (a string, a number, a dict, a named tuple) contributes
    itself. The result is a list even with one process. Objects are pickled and sent between the
    processes of the run, never through a file. Tensors on an accelerator arrive on the receiver's
    device.

    Example::

        devices = gather_object(str(accelerator.device))  # one text for each process

    Args:
        object: The object of this process. Type and length may differ between processes.

    Raises:
        Exception: The pickling error, on the process whose object cannot be pickled.
        RuntimeError: On the other processes in that case.
        DistributedOperationException: The processes' calls do not match.
    """
    return gather_object_from(object, None)


def gather_object_from(object: Any, processes: int | None, copies: int = 1) -> list[Any]:  # noqa: A002 - see above
    """Gather objects of the first `processes` ranks (None: all), one per `copies` equal ones."""
    # A set is converted to a list here, because its order differs between processes. An array is
    # sent as one object, not element by element.
    local = object if isinstance(object, _ARRAYS) else _elements(object)
    shares = _exchange("gather_object", local)[::copies][:processes]
    return list(chain.from_iterable(map(_elements, shares)))


def _elements(thing: Any) -> list[Any]:
    return list(thing) if is_sequence(thing) else [thing]


def is_sequence(thing: Any) -> bool:
    """Return whether `gather_object` gathers the object's elements, not the object itself."""
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return False
    if isinstance(thing, _ARRAYS):
        return thing.ndim > 0
    return isinstance(thing, _SEQUENCES)


def all_gather_object(value: Any) -> list[Any]:
    """Return the value of each process, in the order of the ranks; a collective call.

    Raises:
        Exception: See `gather_object`.
    """
    return _exchange("all_gather_object", value)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Broadcast the elements of one process's list to the lists of all processes, in place.

    Args:
        object_list: The list; it is changed in place and returned.
        from_process: The rank that sends; default 0.

    Raises:
        ValueError: There is no such rank.
    """
    values = broadcast_object(object_list, from_process)
    if values is not object_list:
        object_list[:] = values
    return object_list


def broadcast_object(value: Any, from_process: int = 0) -> Any:
    """Return the value of rank `from_process` on every process; a collective call.

    Raises:
        Exception: See `gather_object`.
        ValueError: There is no such rank.
    """
    check_rank(from_process)
    state = PartialState()
    if state.num_processes == 1:
        return value
    payload, error = transport.dump(value) if state.process_index == from_process else (b"", None)
    size = check_collective(f"broadcast_object from {from_process}", len(payload))[from_process]
    buffer = torch.zeros(size, dtype=torch.uint8)
    if payload:
        buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    buffer = buffer.to(guards.side_device())
    transport.send(buffer, from_process)
    if error is not None:
        raise error
    if state.process_index == from_process:
        return value
    return _received(transport.load(guards.read_back(buffer).numpy().tobytes()), from_process)


def _exchange(operation: str, value: Any) -> list[Any]:
    if PartialState().num_processes == 1:
        return [value]
    payload, error = transport.dump(value)
    sizes = check_collective(operation, len(payload))
    payloads = guards.all_gather_bytes(payload, sizes)
    if error is not None:
        raise error
    return [_received(transport.load(data), rank) for rank, data in enumerate(payloads)]


def _received(value: Any, rank: int) -> Any:
    if isinstance(value, transport.Unsendable):
        raise RuntimeError(f"Rank {rank} could not send its object: {value.reason}")
    return value
