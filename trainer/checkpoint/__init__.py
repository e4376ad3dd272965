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
* ``state``: objects with a state, saved and restored in the order of a mapping;
* ``parts``: what one process contributes to a checkpoint, and the reader of all parts;
* ``save``: run a step on all ranks, raising on all if it fails on one; save a checkpoint this way;
* ``async_writer``: one save at a time, copied to host memory and written by a thread;
* ``resolve``: find the checkpoint meant by a ``ckpt_path`` or a number, or the newest one;
* ``lock``: allow one run at a time per folder;
* ``accelerator_state``: ``Accelerator.save_state`` and ``load_state``; ``gradients``: the gradients
  of an incomplete accumulation window; ``accelerate_format``: read folders that accelerate wrote.

The parts of a fit are listed in ``trainer.loops.fit_state``.
"""
