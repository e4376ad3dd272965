"""Convert Lightning's checkpoints (``.ckpt`` files) to checkpoints of the Trainer.

Such a file is a pickle of a dict, which torch reads with ``weights_only=True``, without running
code::

    {"state_dict": …, "optimizer_states": […], "lr_schedulers": […],     as torch's own
     "epoch": …, "global_step": …, "loops": {"fit_loop": …},             the position
     "callbacks": {…}, "MixedPrecision": …, "hyper_parameters": {…}}

With Lightning's ``WeightAveraging``, ``state_dict`` has the averages, ``current_model_state`` the
trained weights, and ``averaging_state`` the number of updates of the average, ``n_averaged``.

The file has neither the states of random generators nor the order of the data, so a resumed run
draws both anew.
"""

from __future__ import annotations

import math
import pickle
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from callbacks import Progress, WeightAveraging
from trainer.checkpoint.loading import read_torch_file
from trainer.checkpoint.parts import TRAINED_NAME
from trainer.checkpoint.serialization import encode_tree, save_tree
from trainer.checkpoint.storage import commit, open_staging, rank_stem
from trainer.checkpoint.weights import save_weights
from trainer.errors import CheckpointError
from trainer.files import with_home
from trainer.hparams import kept_by, to_manifest
from trainer.lightning.pytorch import callbacks as known_callbacks
from trainer.loops.fit_state import OPTIMIZER, RECORD, TRAINER
from trainer.loops.run_metadata import versions
from trainer.loops.state import Counters

_SCALERS = ("MixedPrecision", "MixedPrecisionPlugin", "native_amp_scaling_state")
_VERSION = "pytorch-lightning_version"
_OF_LIGHTNING = {
    *("epoch", "global_step", _VERSION, "state_dict", "loops", "callbacks", "optimizer_states"),
    *("lr_schedulers", "hyper_parameters", "hparams_name", "hparams_type", *_SCALERS),
    *("datamodule_hyper_parameters", "datamodule_hparams_name", "datamodule_hparams_type"),
    *("current_model_state", "averaging_state"),
}
_NOTHING_OF_RANK: dict[str, Any] = {
    "rng": None,
    "metrics": {"epochs": {}, "stepwise": {}, "states": {}, "names": []},
    "stream": None,
}
"""The state of a rank, of which Lightning saves nothing."""


@dataclass(frozen=True)
class Conversion:
    """A converted checkpoint.

    Attributes:
        path: The folder.
        step: The number of updates.
        weights_only: Whether it has only weights, from which no run can resume.
        notes: The parts of the file that were not converted, a sentence for each.
    """

    path: Path
    step: int
    weights_only: bool
    notes: list[str] = field(default_factory=list)


def convert_checkpoint(
    path: str | Path, output: str | Path | None = None, *, num_processes: int = 1
) -> Conversion:
    """Convert a Lightning checkpoint to one of the Trainer: weights, optimizers and counters.

    ``Trainer.fit(module, ckpt_path=folder)`` resumes from it, and `load_from_checkpoint` loads it.

    Args:
        path: The ``.ckpt`` file.
        output: The new folder; None is `path` without its suffix.
        num_processes: The number of processes of the run, since the file counts the batches of one
            process.

    Raises:
        CheckpointError: The file is not a Lightning checkpoint, holds objects that are not plain
            values, or is damaged; or `output` exists and is not a checkpoint.
    """
    file = Path(with_home("path", path))
    target = file.with_suffix("") if output is None else Path(with_home("output", output))
    saved = _read(file)
    loops = saved.get("loops")
    resumes = "optimizer_states" in saved and loops is not None
    notes: list[str] = []
    if "optimizer_states" in saved and loops is None:
        notes.append(
            "Only its weights are converted: Lightning before 1.5 kept no counters of its loops. "
            "`python -m lightning.pytorch.utilities.upgrade_checkpoint` brings a file up to date."
        )
    counters = _counters(saved, num_processes) if resumes else Counters(saved["global_step"])
    manifest: dict[str, Any] = {
        "step": counters.global_step,
        "epoch": counters.epoch,
        "world_size": 1,
        "data_size": 1,
        "run_id": uuid.uuid4().hex,
        "metrics": _metrics(saved.get("callbacks", {})),
        "versions": versions() | {"lightning": str(saved.get(_VERSION))},
        "configuration": {},
        "hyper_parameters": _hyper_parameters(saved, notes),
        "weights_only": not resumes,
    }
    state = _state(saved, counters, manifest["run_id"], notes) if resumes else {}
    staging = open_staging(target)
    trained = saved.get("current_model_state")
    if trained is not None and not _averages(saved):  # its averages are the initial weights
        saved["state_dict"], trained = trained, None
    _write_weights(saved["state_dict"], staging, file)
    if trained is not None:
        _write_weights(trained, staging / TRAINED_NAME, file)
    if resumes:
        save_tree(saved["optimizer_states"], staging, OPTIMIZER)
        save_tree(state, staging, TRAINER)
        save_tree({"offset": None, "trackers": {}}, staging, RECORD)
        save_tree(_NOTHING_OF_RANK, staging, rank_stem(0))
    commit(staging, target, manifest)
    return Conversion(target, counters.global_step, not resumes, notes)


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a file, which may contain only plain values and tensors.

    Raises:
        CheckpointError: The file contains something else; the message has a fix.
    """
    if file.is_dir():
        raise CheckpointError(
            f"{file} is a folder of shards: `python -m "
            f"lightning.pytorch.utilities.consolidate_checkpoint {file}` makes one file of it."
        )
    try:
        saved = read_torch_file(file)
    except CheckpointError as error:
        if not isinstance(error.__cause__, pickle.UnpicklingError):
            raise
        raise _refusal(file, error) from error
    if not (isinstance(saved, dict) and "state_dict" in saved and "global_step" in saved):
        raise CheckpointError(
            f"{file} is not a checkpoint of Lightning, which has 'state_dict' and 'global_step'."
        )
    return saved


def _refusal(file: Path, error: CheckpointError) -> CheckpointError:
    try:
        objects = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # noqa: BLE001 - damaged, as the original error says
        return error
    modules = ", ".join(sorted({name.rpartition(".")[0] for name in objects} - {"builtins"}))
    names = ", ".join(name.removeprefix("builtins.") for name in objects)
    return CheckpointError(
        f"{file} holds objects besides tensors and plain values, mostly hyper-parameters: "
        f"{names}. Creating them runs code that the file names. If you trust it, say so:\n\n"
        f"    import torch, {', '.join(filter(None, [modules]))}\n"
        "    from trainer.lightning import convert_checkpoint\n\n"
        f"    with torch.serialization.safe_globals([{names}]):\n"
        f"        convert_checkpoint({str(file)!r})\n\n"
        "Or save it again with Lightning, without them: save_hyperparameters(ignore=...), or "
        "ModelCheckpoint(save_weights_only=True)."
    )


def _counters(saved: Mapping[str, Any], processes: int) -> Counters:
    """Return the position; an epoch counts as complete after its last batch was processed."""
    fit = saved["loops"]["fit_loop"]
    batches = fit["epoch_loop.batch_progress"]
    epochs, current = fit["epoch_progress"]["current"], batches["current"]
    processed, is_last = current["processed"], batches.get("is_last_batch", False)
    begun = epochs["ready"] > epochs["completed"] or epochs["processed"] > 0
    complete = begun and (
        epochs["processed"] >= epochs["ready"] or (is_last and processed >= current["ready"])
    )
    return Counters(
        global_step=_updates(saved["global_step"], fit),
        epoch=max(epochs["ready"] - 1, 0),
        epoch_batches=processed * processes if begun else 0,
        epoch_complete=complete,
        batches_seen=batches["total"]["processed"] * processes,
    )


def _updates(steps: int, fit: Mapping[str, Any]) -> int:
    """Return the number of updates; in manual optimisation Lightning counts each optimizer's."""
    manual = fit.get("epoch_loop.manual_optimization.optim_step_progress", {})
    if not manual.get("total", {}).get("completed"):
        return steps
    return int(min(steps, fit["epoch_loop.batch_progress"]["total"]["processed"]))


def _state(
    saved: Mapping[str, Any], counters: Counters, run_id: str, notes: list[str]
) -> dict[str, Any]:
    """Return the state that `trainer.loops.fit_state` saves, as far as the file has it."""
    if counters.epoch_batches and not counters.epoch_complete:
        notes.append(
            f"It was saved inside an epoch, after {counters.epoch_batches} batches over all "
            "processes. A loader without shuffling continues at that position; a shuffled loader "
            "has a different order in Cadence, so some samples are read twice and others not at "
            "all."
        )
    extra = {name: value for name, value in saved.items() if name not in _OF_LIGHTNING}
    extra = _plain(extra, "what on_save_checkpoint added", notes)
    shown = counters.state_dict() | {"seconds": 0.0}
    before = Progress(counters.global_step, counters.epoch + float(counters.epoch_complete))
    return {
        "run_id": run_id,
        "counters": shown,
        "items_seen": 0.0,
        "reference": None,
        "data": None,
        "should_stop": False,
        "unfinished": False,
        "last_logged": counters.global_step,
        "latest": {},
        "updates": {},
        "schedules": {
            "val": ["1 epoch", before._asdict()],
            "log": ["50 steps", before._asdict()],
        },
        "optimizers": None,
        "groups": [
            [[None] * len(group["params"]) for group in state["param_groups"]]
            for state in saved["optimizer_states"]
        ],
        "schedulers": saved.get("lr_schedulers", []),
        "scaler": next((saved[name] for name in _SCALERS if name in saved), {}),
        "guard": None,
        "callbacks": _callbacks(saved.get("callbacks", {}), notes) | _state_of_averages(saved),
        "extra": extra | {"epoch": counters.epoch, "global_step": counters.global_step},
    }


def _callbacks(states: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the states of the user's callbacks; states of Lightning's callbacks differ in form."""
    # The states of `WeightAveraging` and its subclasses are read by `_state_of_averages`.
    states = {
        key: state for key, state in states.items() if state and {*state} != {"latest_update_step"}
    }
    own = {
        key: state
        for key, state in states.items()
        if not hasattr(known_callbacks, key.partition("{")[0])
    }
    if others := sorted(states.keys() - own.keys()):
        notes.append(
            f"These Lightning callbacks start without their saved state: {', '.join(others)}."
        )
    return _plain(own, "the state of the callback", notes)


def _averages(saved: Mapping[str, Any]) -> int:
    """Return the number of updates of the average in the file's ``state_dict``."""
    return int(saved.get("averaging_state", {}).get("n_averaged", 0))


def _state_of_averages(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of our `WeightAveraging`, which takes the averages from the weights."""
    updates = _averages(saved)
    if not updates:
        return {}
    weights = {name: value for name, value in saved["state_dict"].items() if torch.is_tensor(value)}
    names = [name for name, value in weights.items() if value.is_floating_point()]
    state = {"num_updates": updates, "names": names, "exact": {}}
    return {WeightAveraging().state_key: state}


def _metrics(states: Mapping[str, Any]) -> dict[str, float]:
    """Return the monitored metrics of this checkpoint, from ModelCheckpoint's state."""
    values = {
        state["monitor"]: float(state["current_score"])
        for state in states.values()
        if isinstance(state, Mapping)
        and isinstance(state.get("monitor"), str)
        and isinstance(state.get("current_score"), (torch.Tensor, float))
    }
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _hyper_parameters(saved: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    values = saved.get("hyper_parameters", {})
    argument = saved.get("hparams_name", "kwargs")
    owner = SimpleNamespace()

    def check(name: str) -> None:
        kept = kept_by(one := SimpleNamespace())
        kept.values[name] = values[name]
        to_manifest(one)

    for name in _without(values, check, "the hyper-parameter", notes):
        kept = kept_by(owner)
        kept.values[name] = values[name]
        kept.places[name] = name if argument == "kwargs" else argument
    return to_manifest(owner)


def _plain(values: Mapping[str, Any], what: str, notes: list[str]) -> dict[str, Any]:
    def check(name: str) -> None:
        encode_tree(values[name], str(name))

    return {name: values[name] for name in _without(values, check, what, notes)}


def _without(
    values: Mapping[str, Any], check: Callable[[str], None], what: str, notes: list[str]
) -> list[str]:
    """Return the names of values that pass a check, and add a note about the others."""
    good = []
    for name in values:
        try:
            check(name)
        except TypeError as error:
            notes.append(f"Left out: {what} {name!r}. {error}")
        else:
            good.append(name)
    return good


def _write_weights(state_dict: Mapping[str, Any], staging: Path, file: Path) -> None:
    try:
        save_weights(state_dict, staging)
    except TypeError as error:
        raise CheckpointError(f"The weights in {file} cannot be converted: {error}") from error
