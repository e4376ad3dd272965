"""Checkpoints: folders of tensors and JSON, committed atomically.

The format, version 1::

    checkpoints/step-00000100/
        manifest.json           format version, the caller's fields, every file's size and SHA-256
        model.safetensors       weights under the module's own names
        trained.safetensors     if those are averages: the weights that training resumes with
        optimizer.json          the tree of a state dict, with the names of its tensors
        optimizer.safetensors   … and the tensors
        trainer.json            the position and state of the run
        datamodule.json         the datamodule's state dict, if it has one
        record.json             the length of the local record
        rank-00000.json         the state of one rank, such as its RNG states

A folder is a checkpoint if and only if it has a manifest. It gets its name by one rename, after
every file is on disk and every rank has confirmed it. Reading never runs code from a file.

``layout`` has the names, commit and removal, ``manifest`` the files' sizes and hashes, ``tensors``
the trees, ``weights`` the weights, and ``fitting`` loads them into a module. ``save`` writes on all
ranks and ``newest`` chooses for all, both by the steps of ``jointly``. ``lock`` keeps a second run
out of a folder, and ``branch`` sets aside the checkpoints after the one that a run resumes from.
``portions`` are each rank's part of a save, copied if training continues while ``writer`` writes.

The `Accelerator`'s state has the same format: ``state`` saves and loads it, ``ranks`` reads the
per-process state, ``restore`` puts it into the objects, with the pending gradients from
``gradients``, ``folder`` commits into a folder with other files, ``project`` names the folders, and
``accelerate_format`` reads those of accelerate. ``model`` and ``load`` handle weights for other
libraries (with ``weightfiles`` and ``offload``), ``objects`` single objects; ``atomic`` and
``torchfile`` are helpers of these.
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


def __getattr__(name: str) -> Any:  # lazy: code that only reads manifests does not import torch
    if name not in _HOME:
        raise AttributeError(f"module 'trainer.checkpoint' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"trainer.checkpoint.{_HOME[name]}"), name)
    return value
