"""The prediction loop: one output per batch, in the order of the loader, without duplicates."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from trainer.data.feed import Feed
from trainer.distributed.objects import all_gather_object
from trainer.loops.evaluate import PREDICT, apart, evaluation_mode, refuse_missing
from trainer.loops.run import Run
from trainer.tree import to_host


def predict(run: Run, feeds: list[Feed], *, keep: bool = True) -> list[list[Any]] | None:
    """Call `predict_step` on every batch of each loader; collective.

    Args:
        run: The run.
        feeds: The epoch iterators, one per loader.
        keep: Whether to gather the outputs. Otherwise only the hooks see them, and memory holds one
            batch at a time.

    Returns:
        On rank 0: for each loader the outputs of all its batches, with tensors in host memory. On
        the other ranks, and without `keep`: None.

    Raises:
        ValueError: A loader gave no batch, or ended on some ranks before the others.
    """
    hooks = run.hooks
    run.eval_lengths = [feed.num_own_batches for feed in feeds]
    with evaluation_mode(run.module):
        hooks.on_predict_start()
        hooks.on_predict_epoch_start()
        parts = [
            predict_feed(run, feed, index, several=len(feeds) > 1, keep=keep)
            for index, feed in enumerate(feeds)
        ]
        refuse_missing(run, PREDICT, [rounds for _, rounds in parts])
        hooks.on_predict_epoch_end_module()
        hooks.on_predict_epoch_end_callbacks()
        hooks.on_predict_end()
    if not keep:
        return None
    gathered = all_gather_object([outputs for outputs, _ in parts])
    if run.rank != 0:
        return None
    return [in_loader_order([part[index] for part in gathered]) for index in range(len(feeds))]


def predict_feed(
    run: Run, feed: Feed, index: int, *, several: bool, keep: bool
) -> tuple[list[Any], int]:
    """Predict the batches of one loader on this rank.

    Args:
        run: The run.
        feed: The epoch iterator of the loader.
        index: The index of the loader.
        several: Whether there are several loaders, so that steps and hooks take the index.
        keep: Whether to keep the outputs.

    Returns:
        This rank's outputs (empty without `keep`), and the number of global batches before its data
        ended early, or all of them.
    """
    outputs = []
    step = run.bare_step("predict_step")
    feed.set_epoch(0)
    rounds_here = 0
    with closing(run.mover.rounds(feed, index, counted=False)) as rounds:
        for batch_idx, current in enumerate(rounds):
            rounds_here += not current.ended
            if not current.present:
                continue
            run.batch_idx = batch_idx
            batch = current.batch
            where = (batch_idx, index) if several else (batch_idx,)
            with apart(PREDICT, feed, current):
                run.hooks.on_predict_batch_start(batch, *where)
                with run.precision.autocast():
                    output = to_host(step(batch, *where))
                run.hooks.on_predict_batch_end(output, batch, *where)
            if keep:
                outputs.append(output)
    return outputs, rounds_here


def in_loader_order(parts: list[list[Any]]) -> list[Any]:
    """Merge the ranks' lists of outputs: with *N* ranks, batch *b* is on rank *b mod N*."""
    rounds = max(len(part) for part in parts)
    return [part[number] for number in range(rounds) for part in parts if number < len(part)]
