"""Checkpoints: a folder of safetensors and JSON files, committed atomically with a manifest.

The format, version 1::

    checkpoints/step-00000100/
        manifest.json           format version, the caller's fields, every file's size and SHA-256
        model.safetensors       weights under the module's own names
        trained.safetensors     only with weight averaging: the trained weights, before averaging
        optimizer.json          the optimizers' state dicts, with a name for each tensor
        optimizer.safetensors   the tensors of these state dicts
        trainer.json            the run's position (epoch, step) and other state
        datamodule.json         the datamodule's state dict, if it has one
        record.json             the length of ``metrics.jsonl`` at this step
        rank-00000.json         the state of one rank, such as its RNG states

A folder is a checkpoint if and only if it has a manifest. It is written under a temporary name and
renamed once every file is on disk and every rank has confirmed its part. Loading never unpickles,
so it cannot run code from a file.

The modules:

* ``storage``: folder names, the manifest with its hashes, atomic commit, removal, quarantine;
* ``serialization``: nested state (trees) to and from JSON and safetensors; ``objects``: one object;
* ``weights``: a module's weights to and from safetensors, in one file or in shards with an index;
* ``loading``: weights of any common form into a module; ``shards``: shards merged into one file;
* ``save``: run a step on all ranks, and raise on all if it fails on one; save a checkpoint so;
* ``async_writer``: each rank's part of a save, copied to host memory and written by a thread;
* ``resolve``: choose the checkpoint to resume from; ``lock``: allow one run at a time per folder;
* ``accelerator_state``: ``Accelerator.save_state`` and ``load_state``, in the same format;
  ``restore`` checks and applies a state, ``gradients`` holds those of an incomplete gradient
  accumulation window, ``project`` numbers the folders;
* ``accelerate_format``: read folders that accelerate wrote.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.checkpoint.loading import load_checkpoint_in_model, load_into
    from trainer.checkpoint.lock import alone_in, holder_of
    from trainer.checkpoint.resolve import check_not_weights_only, newest_sound
    from trainer.checkpoint.save import (
        is_writer_rank,
        raise_on_all_ranks,
        remove_or_warn,
        require_space,
        run_on_all_ranks,
        save_checkpoint,
        writer_rank_of,
    )
    from trainer.checkpoint.serialization import load_tree, save_tree
    from trainer.checkpoint.storage import (
        check_same_run,
        checkpoint_name,
        commit,
        committed,
        later_than,
        leave_branch,
        locate,
        open_staging,
        rank_stem,
        read_manifest,
        remove,
        step_of,
        sweep,
        verify,
    )
    from trainer.checkpoint.weights import WEIGHTS_NAME, load_weights, save_model, save_weights

_HOME = {
    "WEIGHTS_NAME": "weights",
    "alone_in": "lock",
    "checkpoint_name": "storage",
    "commit": "storage",
    "committed": "storage",
    "holder_of": "lock",
    "writer_rank_of": "save",
    "is_writer_rank": "save",
    "later_than": "storage",
    "leave_branch": "storage",
    "load_checkpoint_in_model": "loading",
    "load_into": "loading",
    "load_tree": "serialization",
    "load_weights": "weights",
    "locate": "storage",
    "newest_sound": "resolve",
    "open_staging": "storage",
    "rank_stem": "storage",
    "read_manifest": "storage",
    "check_same_run": "storage",
    "raise_on_all_ranks": "save",
    "check_not_weights_only": "resolve",
    "remove": "storage",
    "remove_or_warn": "save",
    "require_space": "save",
    "save_checkpoint": "save",
    "save_model": "weights",
    "save_tree": "serialization",
    "save_weights": "weights",
    "step_of": "storage",
    "sweep": "storage",
    "run_on_all_ranks": "save",
    "verify": "storage",
}

__all__ = [
    "WEIGHTS_NAME",
    "alone_in",
    "check_not_weights_only",
    "check_same_run",
    "checkpoint_name",
    "commit",
    "committed",
    "holder_of",
    "is_writer_rank",
    "later_than",
    "leave_branch",
    "load_checkpoint_in_model",
    "load_into",
    "load_tree",
    "load_weights",
    "locate",
    "newest_sound",
    "open_staging",
    "raise_on_all_ranks",
    "rank_stem",
    "read_manifest",
    "remove",
    "remove_or_warn",
    "require_space",
    "run_on_all_ranks",
    "save_checkpoint",
    "save_model",
    "save_tree",
    "save_weights",
    "step_of",
    "sweep",
    "verify",
    "writer_rank_of",
]


def __getattr__(name: str) -> Any:  # lazy: reading a manifest needs no torch
    if name not in _HOME:
        raise AttributeError(f"module 'trainer.checkpoint' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"trainer.checkpoint.{_HOME[name]}"), name)
    return value
