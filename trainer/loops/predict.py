"""The prediction loop: one output per batch, in the order of the loader, without duplicates.

Predictions can be written to disk: every rank streams its own, then rank 0 merges them.

A prediction is split into columns, each with one row per sample. Tensors and arrays go to
safetensors files, lists of plain values (strings, labels) to JSON Lines files. Ranks exchange only
sizes, and at most one batch is in memory.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.checkpoint.serialization import aligned, portable, write_header, write_tensors
from trainer.data.epoch_iterator import EpochIterator
from trainer.distributed.objects import all_gather_object
from trainer.distributed.process_control import on_main
from trainer.files import regular
from trainer.loops.device_transfer import batch_hooks
from trainer.loops.evaluate import (
    PREDICT,
    check_all_have_batches,
    evaluate_dummy,
    evaluation_mode,
)
from trainer.loops.state import Run
from trainer.strict_json import dumps, to_json
from trainer.tree import as_bytes, children, to_host

NAME = "predictions"  # the name of the merged files, and of the column if there is only one
_PARTS = ".parts"


class Column(NamedTuple):
    """The dtype of a tensor, and the shape of one row or of the whole column."""

    dtype: torch.dtype
    shape: tuple[int, ...]


Columns = dict[str, Column]  # with the shape of one row
Plain = dict[str, list[Any]]
Rows = tuple[int, ...]  # the number of rows of each tensor in one batch


@dataclass
class Index:
    """The index of the data that one rank has streamed to its part files.

    Attributes:
        columns: The dtype and the shape of one row of each tensor; None before the first batch.
        plain: The names of the columns of plain values.
        rows: For each batch, the number of rows of each tensor.
    """

    columns: Columns | None = None
    plain: tuple[str, ...] = ()
    rows: list[Rows] = field(default_factory=list)


class PredictionFiles:
    """The files of the predictions for one loader.

    Args:
        folder: The folder, the same on all ranks; created if missing.
        rank: The index of the data shard that this process reads.
        world_size: The number of data shards.
        counts: Whether this process writes; False if another process reads the same data.
        merge: Whether each rank streams into one pair of files, which `finish` merges into
            ``predictions.*`` in the order of the loader. Otherwise each batch is written to its own
            pair of files, ``batch-00000000.*``.
        overwrite: Whether to delete existing predictions.

    Raises:
        ValueError: The folder has predictions and `overwrite` is False. Ranks other than 0 raise a
            ``RuntimeError`` instead.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        world_size: int,
        counts: bool,
        merge: bool,
        overwrite: bool,
    ) -> None:
        self.folder, self._merge = folder, merge
        self._rank, self._world_size, self._counts = rank, world_size, counts
        self._index = Index()
        self._parts = folder / _PARTS
        self._own = ExitStack()
        on_main(lambda: _make_room(folder, overwrite=overwrite))
        if not counts:
            return
        if merge:  # `finish` detects a folder that the ranks do not share
            self._parts.mkdir(parents=True, exist_ok=True)
            tensors, plain = self._part_files(rank)
            for part in (tensors, plain):  # left by an interrupted prediction
                part.unlink(missing_ok=True)
            self._tensors = self._own.enter_context(tensors.open("xb"))
            self._plain = self._own.enter_context(plain.open("xb"))
        else:
            folder.mkdir(parents=True, exist_ok=True)

    def add(self, prediction: Any, batch_number: int) -> None:
        """Write the prediction for a batch.

        Args:
            prediction: A tensor of shape ``(N, …)`` for N samples, or nested containers of tensors,
                arrays and lists of plain values, each with one row per sample; in host memory.
            batch_number: The batch's position in the loader's order, from 0.

        Raises:
            TypeError: It contains an object of another type; the message names the column.
            ValueError: A column has no rows, or its dtype or row shape differs from that of earlier
                batches.
            OSError: A file cannot be written.
        """
        if not self._counts:
            return
        tensors, plain = columns_of(prediction, batch_number)
        if not self._merge:
            self._write_batch(tensors, plain, batch_number)
            return
        self._note(tensors, plain, batch_number)
        for tensor in tensors.values():
            self._tensors.write(_bytes_of(tensor))
        if plain:
            self._plain.write(dumps(plain).encode() + b"\n")

    def finish(self) -> None:
        """Merge the part files of all ranks into one pair of files; collective.

        Raises:
            ValueError: The columns differ between ranks (raised on all ranks), or rank 0 does not
                see the files of another rank (raised on rank 0).
            RuntimeError: On the other ranks: rank 0 could not merge the files.
        """
        self._own.close()
        of_all = all_gather_object(self._index if self._counts else None)  # waits for all parts
        indices: list[Index] = [index for index in of_all if index is not None]
        if self._merge:
            merged = _agreed(indices)
            try:
                on_main(lambda: self._merge_all(merged, [index.rows for index in indices]))
            finally:
                # All ranks delete the shared folder at once, so files may be gone already.
                shutil.rmtree(self._parts, ignore_errors=True)

    def discard(self) -> None:
        """Delete this rank's part files, after the prediction failed."""
        try:
            self._own.close()
        finally:  # closing flushes, which may fail
            if self._merge and self._counts:
                for part in self._part_files(self._rank):
                    part.unlink(missing_ok=True)
                with suppress(OSError):  # not empty: the files of other ranks are still there
                    self._parts.rmdir()

    def _part_files(self, rank: int) -> tuple[Path, Path]:
        return self._parts / f"rank-{rank:05d}.bin", self._parts / f"rank-{rank:05d}.jsonl"

    def _write_batch(self, tensors: dict[str, Tensor], plain: Plain, number: int) -> None:
        stem = f"batch-{number:08d}"
        if tensors:
            self._write_whole(f"{stem}.safetensors", lambda file: write_tensors(tensors, file))
        if plain:
            lines = b"".join(_lines_of(plain))
            self._write_whole(f"{stem}.jsonl", lambda file: file.write_bytes(lines))

    def _write_whole(self, name: str, write: Callable[[Path], object]) -> None:
        """Write a file atomically: it appears complete or, if writing fails, not at all."""
        staged = self.folder / f".{name}"
        staged.unlink(missing_ok=True)  # left by an interrupted prediction
        staged.touch(exist_ok=False)  # do not follow a symbolic link in its place
        try:
            write(staged)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        os.replace(staged, self.folder / name)

    def _note(self, tensors: dict[str, Tensor], plain: Plain, number: int) -> None:
        """Check that a batch has the columns of the earlier ones, and record its sizes."""
        columns = {
            name: Column(tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in tensors.items()
        }
        index = self._index
        if index.columns is None:
            index.columns, index.plain = columns, tuple(plain)
        problem = _difference(index, Index(columns, tuple(plain)))
        if problem:
            raise ValueError(
                f"The prediction for batch {number} cannot be merged with earlier ones: {problem}. "
                "Return columns of one shape per sample (pad them), or write each batch to its own "
                "file with write_interval='batch'."
            )
        index.rows.append(tuple(len(tensor) for tensor in tensors.values()))

    def _merge_all(self, merged: Index, rows: Sequence[list[Rows]]) -> None:
        """Merge the part files of all ranks, one batch at a time."""
        try:
            with ExitStack() as stack:
                opened = [
                    [
                        stack.enter_context(open(part, "rb", opener=regular))
                        for part in self._part_files(rank)
                    ]
                    for rank in range(self._world_size)
                ]
                tensors, plain = zip(*opened, strict=True)
                if merged.columns:
                    staged = self._parts / "merged.safetensors"
                    with staged.open("xb") as file:
                        _merge_tensors(file, merged.columns, rows, tensors)
                    os.replace(staged, self.folder / f"{NAME}.safetensors")
                if merged.plain:
                    staged = self._parts / "merged.jsonl"
                    with staged.open("xb") as file:
                        for line in _in_turn(plain, sum(map(len, rows))):
                            file.writelines(_lines_of(json.loads(line)))
                    os.replace(staged, self.folder / f"{NAME}.jsonl")
        except FileNotFoundError as error:
            raise ValueError(
                f"{error.filename} does not exist: the processes do not share the folder "
                f"{self.folder}. Pass a folder that all processes share, or write each batch to "
                "its own file with write_interval='batch'."
            ) from error


def columns_of(prediction: Any, batch_number: int) -> tuple[dict[str, Tensor], Plain]:
    """Split a prediction into its tensors and its lists of plain values, both by column name.

    Args:
        prediction: The output of `predict_step` for one batch.
        batch_number: The batch's number, for errors.

    Raises:
        TypeError: It contains None, or another object that is neither a tensor nor a list.
        ValueError: A tensor has no sample dimension, two lists differ in length, or two columns
            have the same name.
    """
    tensors: dict[str, Tensor] = {}
    plain: Plain = {}
    for name, value in _leaves(prediction, ""):
        what = f"{name!r} of the prediction for batch {batch_number}"
        if name in tensors or name in plain:
            raise ValueError(f"{what} occurs twice; rename one of them.")
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            value = torch.from_numpy(value.copy())  # a copy is writable, which torch requires
        if isinstance(value, Tensor):
            if value.ndim == 0:
                raise ValueError(f"{what} has no sample dimension; return one row per sample.")
            tensors[name] = portable(value, what)
        elif isinstance(value, list):
            try:
                plain[name] = to_json(value)
            except (TypeError, RecursionError) as error:
                raise TypeError(f"{what} cannot be written as JSON: {error}.") from error
        else:
            raise TypeError(
                f"{what} is {value!r} of type {type(value).__name__}; return tensors, arrays and "
                "lists with one entry per sample."
            )
    if len({len(values) for values in plain.values()}) > 1:
        lengths = ", ".join(f"{name!r}: {len(values)}" for name, values in plain.items())
        raise ValueError(
            f"The lists of the prediction for batch {batch_number} differ in length ({lengths}); "
            "each must have one entry per sample."
        )
    return tensors, plain


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    parts = children(value)
    if isinstance(value, (list, tuple)) and not any(map(_is_rich, value)):
        parts = None if value or not name else []  # a list of plain values is a column
        value = list(value)
    if parts is None:
        yield name or NAME, value
    else:
        for key, part in parts:
            yield from _leaves(part, f"{name}.{key}" if name else str(key))


def _is_rich(value: Any) -> bool:
    """Return whether a value is a tensor, an array, or a container that may hold some."""
    return isinstance(value, (Tensor, np.ndarray)) or children(value) is not None


def _lines_of(plain: Plain) -> Iterator[bytes]:
    """Yield one JSON object per sample."""
    for values in zip(*plain.values(), strict=True):
        yield dumps(dict(zip(plain, values, strict=True))).encode() + b"\n"


def _bytes_of(tensor: Tensor) -> Any:
    return as_bytes(tensor.cpu()).numpy().data


def _make_room(folder: Path, *, overwrite: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        shutil.rmtree(folder / _PARTS)  # left by an interrupted prediction
    for left in folder.glob(".batch-*.*"):  # likewise
        left.unlink()
    found = [
        file
        for pattern in (f"{NAME}.*", "batch-*.*")
        for file in sorted(folder.glob(pattern))
        if file.suffix in (".safetensors", ".jsonl")
    ]
    if found and not overwrite:
        raise ValueError(
            f"{folder} already has predictions, such as {found[0].name}. Give another folder, or "
            "pass overwrite=True to replace them."
        )
    for file in found:
        file.unlink()


def _difference(one: Index, other: Index) -> str:
    """Describe how the columns of two indexes differ; an empty string if they do not."""
    expected, columns = (
        [f"{name}: {dtype} {shape}" for name, (dtype, shape) in (each.columns or {}).items()]
        + [f"{name}: a list" for name in each.plain]
        for each in (one, other)
    )
    return "" if expected == columns else f"its columns per sample are {columns}, not {expected}"


def _agreed(indices: Sequence[Index]) -> Index:
    """Return the columns of the predictions, checked to be equal on all ranks with a batch.

    Raises:
        ValueError: The columns differ between ranks.
    """
    indexed = [(rank, index) for rank, index in enumerate(indices) if index.columns is not None]
    if not indexed:
        return Index()
    first_rank, first = indexed[0]
    for rank, index in indexed[1:]:
        problem = _difference(first, index)
        if problem:
            raise ValueError(
                f"The predictions of rank {rank} cannot be merged with those of rank {first_rank}: "
                f"{problem}."
            )
    return first


def _in_turn(parts: Sequence[Any], total: int) -> Iterator[Any]:
    """Yield one entry of each rank in turn: the order in which batches were sharded."""
    iterators = [iter(part) for part in parts]
    for number in range(total):
        yield next(iterators[number % len(iterators)])


def _merge_tensors(
    file: BinaryIO, columns: Columns, rows: Sequence[list[Rows]], parts: Sequence[BinaryIO]
) -> None:
    """Write one safetensors file."""
    places = {name: place for place, name in enumerate(columns)}
    row_bytes = [dtype.itemsize * math.prod(shape) for dtype, shape in columns.values()]
    described = aligned(
        {
            name: Column(dtype, (sum(b[places[name]] for part in rows for b in part), *shape))
            for name, (dtype, shape) in columns.items()
        }
    )
    write_header(file, described)
    for name in described:
        place = places[name]
        chunks = [
            _chunks(*part_and_rows, row_bytes, place)
            for part_and_rows in zip(parts, rows, strict=True)
        ]
        file.writelines(_in_turn(chunks, sum(map(len, rows))))


def _chunks(
    part: BinaryIO, batches: list[Rows], row_bytes: list[int], place: int
) -> Iterator[bytes]:
    """Yield the bytes of one column, batch by batch."""
    begin = 0
    for rows in batches:
        sizes = [count * size for count, size in zip(rows, row_bytes, strict=True)]
        part.seek(begin + sum(sizes[:place]))
        yield part.read(sizes[place])
        begin += sum(sizes)


def predict(run: Run, *, keep: bool = True) -> list[list[Any]] | None:
    """Call `predict_step` on every batch of each of the `Run.eval_iterators`; collective.

    Args:
        run: The run.
        keep: Whether to gather the outputs. Otherwise only the hooks see them, and memory holds one
            batch at a time.

    Returns:
        On rank 0: for each loader the outputs of all its batches, with tensors in host memory. On
        the other ranks, and without `keep`: None.

    Raises:
        ValueError: A loader gave no batch, or ended on some ranks before the others.
    """
    hooks, keeps = run.hooks, keep and run.engine.parallel.is_data_primary
    epoch_iterators = run.eval_iterators
    with evaluation_mode(run.module):
        hooks.on_predict_start()
        hooks.on_predict_epoch_start()
        parts = [
            predict_loader(run, epoch_iterator, index, several=len(epoch_iterators) > 1, keep=keeps)
            for index, epoch_iterator in enumerate(epoch_iterators)
        ]
        global_batches = [number for _, number in parts]
        check_all_have_batches(run, PREDICT, global_batches)
        hooks.on_predict_epoch_end_module()
        hooks.on_predict_epoch_end_callbacks()
        hooks.on_predict_end()
    if not keep:
        return None
    gathered = all_gather_object([outputs for outputs, _ in parts])  # empty if it does not count
    if run.rank != 0:
        return None
    return [
        in_loader_order([part[index] for part in gathered]) for index in range(len(epoch_iterators))
    ]


def predict_loader(
    run: Run, epoch_iterator: EpochIterator, index: int, *, several: bool, keep: bool
) -> tuple[list[Any], int]:
    """Predict the batches of one loader on this rank.

    Args:
        run: The run.
        epoch_iterator: The epoch iterator of the loader.
        index: The index of the loader.
        several: Whether there are several loaders, so that steps and hooks take the index.
        keep: Whether to keep the outputs.

    Returns:
        This rank's outputs (empty without `keep`), and the number of global batches until its data
        ended.
    """
    outputs = []
    step = run.bare_step("predict_step")
    epoch_iterator.set_epoch(0)
    read_here = 0
    global_batches = run.device_transfer.global_batches(epoch_iterator, index, counted=False)
    with run.engine.evaluating(), closing(global_batches):
        for batch_idx, current in enumerate(global_batches):
            read_here += not current.ended
            run.batch_idx = batch_idx
            batch = current.batch
            where = (batch_idx, index) if several else (batch_idx,)
            if not current.present:
                evaluate_dummy(run, step, batch, where)
                continue
            hooks = batch_hooks(run.hooks, PREDICT, epoch_iterator, current)
            hooks.on_predict_batch_start(batch, *where)
            with run.precision.autocast():
                output = step(batch, *where)
            run.engine.mark_step()
            output = to_host(output)
            hooks.on_predict_batch_end(output, batch, *where)
            if keep:
                outputs.append(output)
    return outputs, read_here


def in_loader_order(parts: list[list[Any]]) -> list[Any]:
    """Merge the ranks' lists of outputs: with *N* ranks, batch *b* is on rank *b mod N*."""
    global_batches = max(len(part) for part in parts)
    return [
        part[number] for number in range(global_batches) for part in parts if number < len(part)
    ]
