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

The modules for the Trainer's checkpoints:

* ``layout``: folder names, atomic commit, removal, quarantine;
* ``manifest``: the list of files with sizes and SHA-256 hashes, and its verification;
* ``tensors``: nested state (trees) to and from JSON and safetensors;
* ``weights``: a module's weights to and from safetensors; ``fitting``: load them into a module;
* ``jointly``: run a step on all ranks and raise on all if it fails on one; the writer rank;
* ``save``: save a checkpoint on all ranks; ``newest``: choose the one to resume from;
* ``portions``: each rank's part of a save, and copies of it in host memory;
* ``writer``: saves in the foreground or on a background thread;
* ``lock``: allow one run at a time per folder;
* ``branch``: rename the checkpoints that are later than the one a run resumes from.

The modules for ``Accelerator.save_state``, in the same format:

* ``state``: save and load; ``ranks``: the per-rank files; ``restore``: check and apply a state;
* ``gradients``: gradients of an incomplete gradient accumulation window;
* ``folder``: commit into a folder that also holds other files; ``project``: numbered folders;
* ``accelerate_format``: read folders that accelerate wrote.

``model`` and ``load`` write and read weights in the layout of other libraries, with
``weightfiles``, ``merge`` and ``offload``. ``objects`` saves and loads single objects. ``atomic``
and ``torchfile`` are helpers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.checkpoint.branch import later_than, leave_branch, refuse_other_runs
    from trainer.checkpoint.fitting import load_into
    from trainer.checkpoint.jointly import keeper_of, keeps, refuse_together, together
    from trainer.checkpoint.layout import (
        checkpoint_name,
        commit,
        committed,
        locate,
        open_staging,
        rank_stem,
        remove,
        step_of,
        sweep,
    )
    from trainer.checkpoint.load import load_checkpoint_in_model
    from trainer.checkpoint.lock import alone_in, holder_of
    from trainer.checkpoint.manifest import read_manifest, verify
    from trainer.checkpoint.model import save_model
    from trainer.checkpoint.newest import newest_sound, refuse_weights_alone
    from trainer.checkpoint.save import remove_or_tell, require_space, save_checkpoint
    from trainer.checkpoint.tensors import load_tree, save_tree
    from trainer.checkpoint.weights import WEIGHTS_NAME, load_weights, save_weights

_HOME = {
    "WEIGHTS_NAME": "weights",
    "alone_in": "lock",
    "checkpoint_name": "layout",
    "commit": "layout",
    "committed": "layout",
    "holder_of": "lock",
    "keeper_of": "jointly",
    "keeps": "jointly",
    "later_than": "branch",
    "leave_branch": "branch",
    "load_checkpoint_in_model": "load",
    "load_into": "fitting",
    "load_tree": "tensors",
    "load_weights": "weights",
    "locate": "layout",
    "newest_sound": "newest",
    "open_staging": "layout",
    "rank_stem": "layout",
    "read_manifest": "manifest",
    "refuse_other_runs": "branch",
    "refuse_together": "jointly",
    "refuse_weights_alone": "newest",
    "remove": "layout",
    "remove_or_tell": "save",
    "require_space": "save",
    "save_checkpoint": "save",
    "save_model": "model",
    "save_tree": "tensors",
    "save_weights": "weights",
    "step_of": "layout",
    "sweep": "layout",
    "together": "jointly",
    "verify": "manifest",
}

__all__ = [
    "WEIGHTS_NAME",
    "alone_in",
    "checkpoint_name",
    "commit",
    "committed",
    "holder_of",
    "keeper_of",
    "keeps",
    "later_than",
    "leave_branch",
    "load_checkpoint_in_model",
    "load_into",
    "load_tree",
    "load_weights",
    "locate",
    "newest_sound",
    "open_staging",
    "rank_stem",
    "read_manifest",
    "refuse_other_runs",
    "refuse_together",
    "refuse_weights_alone",
    "remove",
    "remove_or_tell",
    "require_space",
    "save_checkpoint",
    "save_model",
    "save_tree",
    "save_weights",
    "step_of",
    "sweep",
    "together",
    "verify",
]


def __getattr__(name: str) -> Any:  # lazy: reading a manifest needs no torch
    if name not in _HOME:
        raise AttributeError(f"module 'trainer.checkpoint' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"trainer.checkpoint.{_HOME[name]}"), name)
    return value
