"""Checkpoints: folders of tensors and JSON that exist whole or not at all.

The format, version 1::

    checkpoints/step-00000100/
        manifest.json           format version, the caller's fields, every file's size and SHA-256
        model.safetensors       weights under the module's own names
        trained.safetensors     where those are averages: the weights that the run goes on with
        optimizer.json          the tree of a state dict; its tensors are named in it …
        optimizer.safetensors   … and lie here
        trainer.json            where the run stands
        datamodule.json         what the datamodule says of itself, if it has a state
        record.json             how long the local record was
        rank-00000.json         what belongs to one rank, for example random states

A folder is a checkpoint exactly if it has a manifest, and it gets its name, by one rename, only
when every file is on the disk and every rank has said so. Reading never runs code from a file.

``layout`` has the names, the commit and the removal, ``tensors`` the trees, ``weights`` the
weights, ``fitting`` their return into a module, and ``save`` what the ranks do together. ``lock``
keeps a second run out of a folder, and ``branch`` sets aside what a run leaves behind that goes
back. ``portions`` are what one rank adds, copied if training goes on while ``writer`` writes.

The `Accelerator`'s state has the same format: ``state`` saves and loads it, ``ranks`` reads what is
each process's own, ``restore`` puts it back, with what ``gradients`` has kept of a window,
``folder`` commits it where other files lie, ``project`` names it, and ``accelerate_format`` reads
the folders of accelerate. Weights for other libraries are ``model`` and ``load`` (with
``weightfiles`` and ``offload``), single objects ``objects``; below them are ``atomic`` and
``torchfile``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.checkpoint.branch import later_than, leave_branch, refuse_other_runs
    from trainer.checkpoint.fitting import load_into
    from trainer.checkpoint.layout import (
        checkpoint_name,
        commit,
        committed,
        locate,
        open_staging,
        rank_stem,
        read_manifest,
        remove,
        step_of,
        sweep,
        verify,
    )
    from trainer.checkpoint.load import load_checkpoint_in_model
    from trainer.checkpoint.lock import alone_in, holder_of
    from trainer.checkpoint.model import save_model
    from trainer.checkpoint.save import (
        keeps,
        newest_sound,
        refuse_together,
        refuse_weights_alone,
        remove_or_tell,
        require_space,
        save_checkpoint,
        together,
    )
    from trainer.checkpoint.tensors import load_tree, save_tree
    from trainer.checkpoint.weights import WEIGHTS_NAME, load_weights, save_weights

_HOME = {
    "WEIGHTS_NAME": "weights",
    "alone_in": "lock",
    "checkpoint_name": "layout",
    "commit": "layout",
    "committed": "layout",
    "holder_of": "lock",
    "keeps": "save",
    "later_than": "branch",
    "leave_branch": "branch",
    "load_checkpoint_in_model": "load",
    "load_into": "fitting",
    "load_tree": "tensors",
    "load_weights": "weights",
    "locate": "layout",
    "newest_sound": "save",
    "open_staging": "layout",
    "rank_stem": "layout",
    "read_manifest": "layout",
    "refuse_other_runs": "branch",
    "refuse_together": "save",
    "refuse_weights_alone": "save",
    "remove": "layout",
    "remove_or_tell": "save",
    "require_space": "save",
    "save_checkpoint": "save",
    "save_model": "model",
    "save_tree": "tensors",
    "save_weights": "weights",
    "step_of": "layout",
    "sweep": "layout",
    "together": "save",
    "verify": "layout",
}

__all__ = [
    "WEIGHTS_NAME",
    "alone_in",
    "checkpoint_name",
    "commit",
    "committed",
    "holder_of",
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


def __getattr__(name: str) -> Any:  # when first used: what only reads manifests needs no torch
    if name not in _HOME:
        raise AttributeError(f"module 'trainer.checkpoint' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"trainer.checkpoint.{_HOME[name]}"), name)
    return value
