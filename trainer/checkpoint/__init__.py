"""Checkpoints: folders of tensors and JSON that exist whole or not at all.

The format, version 1::

    checkpoints/step-00000100/
        manifest.json           format version, the caller's fields, every file's size and SHA-256
        model.safetensors       weights under the module's own names
        optimizer.json          the tree of a state dict; its tensors are named in it …
        optimizer.safetensors   … and lie here
        trainer.json            where the run stands
        record.json             how long the local record was
        rank-00000.json         what belongs to one rank, for example random states

A folder is a checkpoint exactly if it has a manifest, and it gets its name, by one rename, only
when every file is on the disk and every rank has said so. Reading never runs code from a file.

``layout`` has the names, the commit and the removal, ``tensors`` the trees, ``weights`` the
weights, and ``save`` what the ranks do together. ``portions`` are what one rank adds, copied if
training goes on while ``writer`` writes.

The `Accelerator`'s state has the same format: ``state`` saves and loads it, ``restore`` puts it
back, ``folder`` commits it where other files lie, ``project`` names it, and ``accelerate_format``
reads the folders of accelerate. Weights for other libraries are ``model`` and ``load`` (with
``weightfiles`` and ``offload``), single objects ``objects``; below them are ``atomic`` and
``torchfile``.
"""

from trainer.checkpoint.layout import (
    FORMAT_VERSION,
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
from trainer.checkpoint.model import save_model
from trainer.checkpoint.save import (
    holds_weights_only,
    keeps,
    newest_sound,
    remove_or_tell,
    require_space,
    save,
    together,
)
from trainer.checkpoint.tensors import load_tree, save_tree
from trainer.checkpoint.weights import WEIGHTS_NAME, load_into, load_weights, save_weights

__all__ = [
    "FORMAT_VERSION",
    "WEIGHTS_NAME",
    "checkpoint_name",
    "commit",
    "committed",
    "holds_weights_only",
    "keeps",
    "load_checkpoint_in_model",
    "load_into",
    "load_tree",
    "load_weights",
    "locate",
    "newest_sound",
    "open_staging",
    "rank_stem",
    "read_manifest",
    "remove",
    "remove_or_tell",
    "require_space",
    "save",
    "save_model",
    "save_tree",
    "save_weights",
    "step_of",
    "sweep",
    "together",
    "verify",
]
