"""Saving and choosing together, on one process and on two."""

from __future__ import annotations

import logging
import os
import shutil
import socket
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from trainer.checkpoint import storage as layout_module
from trainer.checkpoint.resolve import CheckpointFolders, newest_sound
from trainer.checkpoint.save import SaveRequest, save_checkpoint
from trainer.checkpoint.storage import MANIFEST, committed, rank_stem, read_manifest, remove, verify
from trainer.errors import CheckpointError
from trainer.state import PartialState

ALONE = SimpleNamespace(is_main_process=True, num_processes=1, process_index=0)


def save_step(
    step: int, state: object = ALONE, content: str = "x", fail: object = (), bad: object = None
) -> Path:
    """Save checkpoint `step`; the ranks in `fail` raise while they write."""
    rank = dist.get_rank() if dist.is_initialized() else 0

    def write(folder):
        if rank == 0:
            (folder / "model.bin").write_text(content)
        if rank in fail:
            raise OSError(f"no space for {rank}")
        (folder / f"{rank_stem(rank)}.json").write_text(content)

    return save_checkpoint(
        SaveRequest(target=Path("checkpoints") / f"step-{step:08d}"),
        write,
        manifest=lambda: {"step": step, "bad": bad},
        state=state,
    )


def entries() -> list[str]:
    return sorted(os.listdir("checkpoints"))


def test_save_on_one_process():
    path = save_step(3)
    assert verify(path)["step"] == 3
    assert set(read_manifest(path)["files"]) == {"model.bin", "rank-00000.json"}
    assert entries() == ["step-00000003"]


def test_a_failed_save_keeps_the_earlier_checkpoint():
    path = save_step(3, content="old")
    with pytest.raises(CheckpointError, match=r"Saving .*step-00000003 failed: OSErr") as caught:
        save_step(3, content="new", fail=[0])
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        save_step(3, content="new", bad=object())
    verify(path)
    assert (path / "model.bin").read_text() == "old"
    assert entries() == ["step-00000003"]


def test_a_name_taken_by_another_folder_raises():
    Path("mine").mkdir()
    message = r"failed: .*mine exists .* or move it away\.$"
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(SaveRequest(target=Path("mine")), print, manifest=dict, state=ALONE)
    assert os.listdir() == ["mine"]
    assert os.listdir("mine") == []


def test_the_newest_sound_checkpoint_is_chosen(caplog):
    root = Path("checkpoints")
    assert newest_sound(root, ALONE) is None
    for step in (1, 2, 10):
        save_step(step)
    assert newest_sound(root, ALONE) == root / "step-00000010"
    assert caplog.text == ""
    (root / "step-00000010" / "model.bin").write_text("y")
    assert newest_sound(root, ALONE) == root / "step-00000002"
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "step-00000010/model.bin is damaged" in record.getMessage()
    caplog.clear()
    (root / "step-00000002" / MANIFEST).unlink()
    (root / "step-3").mkdir()  # not named as ours are
    assert newest_sound(root, ALONE) == root / "step-00000001"
    first, second = (record.getMessage() for record in caplog.records)
    assert first == f"{root}/step-00000002 is not used: it has no manifest.json, so it is damaged."
    assert "step-00000010/model.bin is damaged" in second


def test_a_checkpoint_of_a_later_release_raises():
    root = Path("checkpoints")
    for step in (1, 2, 3):
        save_step(step)
    manifest = root / "step-00000002" / MANIFEST
    of_later = manifest.read_text().replace('"format_version": 1', '"format_version": 2')
    manifest.write_text(of_later)
    assert newest_sound(root, ALONE) == root / "step-00000003"
    remove(root / "step-00000003")
    with pytest.raises(
        CheckpointError, match=r"step-00000002/manifest.json has format .* its path"
    ):
        newest_sound(root, ALONE)
    with pytest.raises(CheckpointError, match=r"step-00000002 was written by a later release"):
        save_step(2)
    assert manifest.read_text() == of_later
    assert entries() == ["step-00000001", "step-00000002"]


def test_only_damaged_checkpoints_raise():
    for step in (1, 2):
        (save_step(step) / "model.bin").unlink()
    (save_step(3) / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .* Move them away"):
        newest_sound(Path("checkpoints"), ALONE)


def outcome(function):
    """What a rank saw: its result, or its error."""
    try:
        return str(function())
    except CheckpointError as error:
        return f"CheckpointError: {error}"


@pytest.mark.parametrize("fail", [[0], [1], [0, 1]])
def test_a_save_that_fails_on_one_rank_raises_on_all(ranks2, fail):
    def body():
        state = PartialState()
        first = outcome(lambda: save_step(5, state, content="old"))
        second = outcome(lambda: save_step(5, state, content="new", fail=fail))
        state.wait_for_everyone()
        left = entries(), Path("checkpoints/step-00000005/model.bin").read_text()
        state.wait_for_everyone()
        third = outcome(lambda: save_step(5, state, content="newer"))  # still in step
        return first, second, left, third

    seen = ranks2(body)
    assert seen[0] == seen[1]
    first, second, left, third = seen[0]
    assert first == third == str(Path("checkpoints/step-00000005"))
    assert second.startswith("CheckpointError: Saving ")
    for rank in (0, 1):
        assert (f"on rank {rank}: OSError('no space for {rank}')" in second) == (rank in fail)
    assert left == (["step-00000005"], "old")
    assert Path("checkpoints/step-00000005/model.bin").read_text() == "newer"


def test_a_commit_that_fails_on_rank_0_raises_on_all(ranks2):
    def body():
        state = PartialState()
        return outcome(lambda: save_step(5, state, bad=object()))

    seen = ranks2(body)
    assert seen[0] == seen[1]
    assert "failed on rank 0: TypeError" in seen[0]
    assert committed(Path("checkpoints")) == []


def test_ranks_use_the_checkpoint_that_rank_0_chose(ranks2):
    for step in (1, 2):
        save_step(step)
    (Path("checkpoints/step-00000002") / "model.bin").write_text("damaged")
    shutil.copytree("checkpoints/step-00000002", "elsewhere/step-00000002")

    def body():
        state = PartialState()
        # What another rank would find does not count, and it does not look.
        root = Path("checkpoints" if state.is_main_process else "elsewhere")
        return outcome(lambda: newest_sound(root, state))

    assert ranks2(body) == [str(Path("checkpoints/step-00000001"))] * 2


def test_a_choice_that_fails_raises_on_all(ranks2):
    (save_step(1) / "model.bin").unlink()
    seen = ranks2(lambda: outcome(lambda: newest_sound(Path("checkpoints"), PartialState())))
    assert seen[0] == seen[1]
    assert "none of the 1 checkpoints" in seen[0]


@contextmanager
def machine():
    """Inside, this rank is the only one of a machine with a disk of its own."""
    rank = dist.get_rank()
    disk = Path(f"disk-{rank}")
    disk.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(disk)
        yield SimpleNamespace(
            is_main_process=rank == 0,
            is_local_main_process=True,
            process_index=rank,
            local_process_index=0,
            num_processes=2,
        )


def test_machines_without_a_shared_disk_raise(ranks2):
    def body():
        state = PartialState()

        def write(folder):
            state.wait_for_everyone()
            if not state.is_main_process:
                shutil.rmtree(folder)  # this machine does not have it
                (folder / "rank-00001.json").write_text("x")

        request = SaveRequest(target=Path("a"))
        return outcome(lambda: save_checkpoint(request, write, manifest=dict, state=state))

    said, other = ranks2(body)
    assert said == other
    assert f"which rank 0 has created, does not exist on {socket.gethostname()}. " in said
    assert "ProjectConfiguration(save_on_each_node=True)" in said


def newest(state, root="checkpoints"):
    return newest_sound(Path(root), state, on_each_node=True)


def second(state, word=None, root="checkpoints"):
    """The checkpoint of step 2, asked for by its path or as the best."""
    folders = CheckpointFolders(
        own=Path(root), monitors=[("loss", "min")], on_each_node=True, state=state
    )
    return folders.choose(word or Path(root, "step-00000002"))


def chosen(lost=(), run_ids=("a", "a"), choose=newest):
    """What two machines choose of steps 1 and 2, and what each says of it.

    Args:
        lost: Pairs of a rank and a step that is not there any more.
        run_ids: Of each rank's checkpoint of step 2.
        choose: Called with the state.
    """
    rank = dist.get_rank()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    with machine() as state:
        for step, run_id in ((1, "a"), (2, run_ids[rank])):
            manifest = {"step": step, "run_id": run_id, "metrics": {"loss": 1 / step}}
            path = Path(f"checkpoints/step-{step:08d}")
            save_checkpoint(SaveRequest(target=path), print, manifest=manifest.copy, state=ALONE)
        for step in [step for where, step in lost if where == rank]:
            remove(Path(f"checkpoints/step-{step:08d}"))
        logging.getLogger("trainer").addHandler(handler)
        try:
            return outcome(lambda: choose(state)), lines
        finally:
            logging.getLogger("trainer").removeHandler(handler)


def test_a_checkpoint_that_one_machine_lacks_is_skipped(ranks2):
    (first, lines), other = ranks2(lambda: chosen(lost=[(1, 2)]))
    assert first == str(Path("checkpoints/step-00000001"))
    assert lines == [
        "checkpoints/step-00000002 is not used: the machine of rank 1 does not have it."
    ]
    assert other == (first, [])


def test_machines_without_a_common_checkpoint_raise(ranks2):
    (first, lines), other = ranks2(lambda: chosen(lost=[(1, 2), (0, 1)]))
    assert [line.partition(": ")[2] for line in lines] == [
        "the machine of rank 1 does not have it.",
        "the machine of rank 0 does not have it.",
    ]
    assert "none of the 2 checkpoints is intact on every machine" in first
    assert "Copy one to the machines that lack it, or move them away" in first
    assert other == (first, [])


def test_checkpoints_of_different_runs_on_machines_are_skipped(ranks2):
    (first, [line]), other = ranks2(lambda: chosen(run_ids=("a", "b")))
    assert first == other[0] == str(Path("checkpoints/step-00000001"))
    assert "have it from different runs (that of rank 0 from a, that of rank 1 from b)" in line


@pytest.mark.parametrize("word", [None, "best"])
def test_a_requested_checkpoint_of_different_runs_raises(ranks2, word):
    choose = partial(second, word=word)
    path = str(Path("checkpoints/step-00000002"))
    assert [each for each, _ in ranks2(lambda: chosen(choose=choose))] == [path] * 2
    (said, _), (other, _) = ranks2(lambda: chosen(run_ids=("a", "b"), choose=choose))
    assert said == other
    assert f"machines have {path} from different runs (that of rank 0 from a, that" in said


@pytest.mark.parametrize("choose", [newest, partial(second, word="best")], ids=["auto", "best"])
def test_each_machine_loads_from_its_own_folder(ranks2, choose):
    def choose_here(state):
        return choose(state, root=Path("checkpoints").absolute())

    home = Path.cwd()
    assert [each for each, _ in ranks2(lambda: chosen(choose=choose_here))] == [
        str(home / f"disk-{rank}/checkpoints/step-00000002") for rank in range(2)
    ]


def test_a_requested_checkpoint_that_one_machine_lacks_raises_on_all(ranks2):
    (said, _), (other, _) = ranks2(lambda: chosen(lost=[(1, 2)], choose=second))
    assert said == other
    assert "failed on rank 1: There is no checkpoint at checkpoints/step-00000002" in said


def test_a_failed_save_that_cannot_clear_its_staging_folder(monkeypatch, caplog):
    def refuse(folder):
        raise PermissionError("stale handle")

    monkeypatch.setattr(layout_module.shutil, "rmtree", refuse)
    with pytest.raises(CheckpointError, match="no space for 0"):
        save_step(3, fail=[0])
    assert "stale handle" in caplog.text
