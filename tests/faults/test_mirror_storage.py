"""Mirrors at a storage that fails, is slow, is full or refuses, inside the process of the run."""

from __future__ import annotations

import errno
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, ModelCheckpoint
from tests.faults.test_mirror import Net, same_tensors, train
from tests.helpers.storage import following
from trackers import read_metrics
from trainer import Trainer
from trainer.checkpoint import mirror
from trainer.checkpoint.storage import committed, verify
from trainer.errors import CheckpointError


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"storage://{tmp_path}/bucket"


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in committed(folder)]


def first_step(folder: Path) -> int:
    return read_metrics(folder / "metrics.jsonl")[0]["step"]


# -- outages ---------------------------------------------------------------------------------------


def test_a_storage_that_cannot_be_reached_at_the_start_does_not_stop_a_run(url, tmp_path, caplog):
    tries = []

    def rule(kind: str, path: str) -> None:
        if kind == "connect" and len(tries) < 2:  # the check for another run, and the first upload
            tries.append(kind)
            raise OSError("no route to the host")

    with following(rule):
        train(tmp_path / "run", url, 1, path=None)
    assert "no route to the host" in caplog.text
    assert steps(tmp_path / "bucket") == steps(tmp_path / "run" / "checkpoints") == [4, 8]


def test_ranks_agree_about_a_storage_that_cannot_be_reached(ranks, tmp_path):
    def run() -> int:
        with following(rule):
            train(tmp_path / "run", f"storage://{tmp_path}/bucket", 1, path=None, save_top_k=1)
        return len(steps(tmp_path / "bucket"))

    connects = []

    def rule(kind: str, path: str) -> None:
        if kind == "connect" and not connects:
            connects.append(kind)
            raise RuntimeError("no route to the host")

    assert ranks(2)(run) == [1, 1]


def test_a_fetch_that_is_cut_leaves_the_newest(url, tmp_path, caplog):
    """The run goes on from the newest one, although the others could not be fetched."""
    train(tmp_path / "first", url, 2, save_top_k=-1)
    got = []

    def rule(kind: str, path: str) -> None:
        if kind == "get" and "manifest" not in path:
            got.append(Path(path).parent.name)
            if len(set(got)) > 1:
                raise OSError("reset by peer")

    with following(rule):
        train(tmp_path / "second", url, 3, save_top_k=-1)
    assert got[0] == "step-00000016"
    assert "reset by peer" in caplog.text
    assert first_step(tmp_path / "second") == 17


def test_a_copy_that_lacks_a_file_is_not_used(url, tmp_path, caplog):
    train(tmp_path / "first", url, 2)
    *_, older, newest = committed(tmp_path / "bucket")
    (newest / "model.safetensors").unlink()
    train(tmp_path / "second", url, 3)
    assert f"{newest.name} is not used: model.safetensors is damaged" in caplog.text
    assert first_step(tmp_path / "second") == int(older.name.removeprefix("step-")) + 1


@pytest.mark.parametrize("which", ["newest", "all"])
def test_a_damaged_checkpoint_is_replaced_by_its_copy(which, url, tmp_path):
    train(tmp_path / "run", url, 2)
    train(tmp_path / "plain", None, 3)
    here = committed(tmp_path / "run" / "checkpoints")
    for path in here if which == "all" else here[-1:]:
        file = path / "model.safetensors"
        content = file.read_bytes()
        file.unlink()  # not shared with the copy
        file.write_bytes(content[:-1] + b"?")
    train(tmp_path / "run", url, 3)
    found = [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert found == list(range(1, 25))  # none was done again
    assert (tmp_path / "run" / "checkpoints" / f"damaged-{here[-1].name}").is_dir()
    last = "checkpoints/step-00000024/model.safetensors"
    assert same_tensors(tmp_path / "run" / last, tmp_path / "plain" / last)


# -- retention -------------------------------------------------------------------------------------


class Commits(Callback):
    """Lets a storage wait for the next commit of the run."""

    def __init__(self, root: Path) -> None:
        self.root, self.changed, self.over = root, threading.Condition(), False

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        with self.changed:
            self.changed.notify_all()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        with self.changed:
            self.over = True
            self.changed.notify_all()

    def wait_for_later_than(self, step: int) -> None:
        with self.changed:
            assert self.changed.wait_for(
                lambda: self.over or steps(self.root)[-1] > step, timeout=100
            )


def saving(folder: Path, url: str, epochs: int, *more: Callback, **options: Any) -> None:
    """Save each update, and keep the newest alone; the save is over before the next update."""
    torch.manual_seed(0)
    saver = ModelCheckpoint(every=1, mirror=url, background=False, **options)
    trainer = Trainer(
        max_epochs=epochs, project_dir=folder, progress_bar=False, callbacks=[*more, saver]
    )
    trainer.fit(
        Net(), DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4), ckpt_path="auto"
    )


def test_checkpoints_that_come_faster_than_their_uploads_do_not_pile_up(url, tmp_path):
    commits, most = Commits(tmp_path / "run" / "checkpoints"), []

    def rule(kind: str, path: str) -> None:
        if kind == "put" and path.endswith("manifest.json"):
            most.append(len(steps(tmp_path / "bucket")))
            commits.wait_for_later_than(int(Path(path).parent.name.removeprefix("step-")))

    with following(rule):
        saving(tmp_path / "run", url, 2, commits)
    assert len(most) > 4  # of 16 checkpoints, as some are removed before their upload
    assert max(most) == 1
    assert steps(tmp_path / "bucket") == [16]


def test_what_a_failed_upload_has_left_is_removed_before_the_next(url, tmp_path):
    """Else it could fill a bucket that has room for the next."""
    commits, beside = Commits(tmp_path / "run" / "checkpoints"), []

    def rule(kind: str, path: str) -> None:
        name = Path(path).parent.name
        if kind == "put" and name == "step-00000003" and len(list(Path(path).parent.glob("*"))) > 1:
            commits.wait_for_later_than(3)
            raise OSError(errno.ENOSPC, "full")
        if kind == "put" and name not in ("step-00000001", "step-00000002", "step-00000003"):
            beside.append((tmp_path / "bucket" / "step-00000003").exists())

    with following(rule):
        saving(tmp_path / "run", url, 1, commits)
    assert beside
    assert not any(beside)
    assert steps(tmp_path / "bucket") == [8]


def test_a_storage_that_refuses_removals_still_gets_the_newest(url, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(mirror, "_PATIENCE", 0.0)

    def rule(kind: str, path: str) -> None:
        if kind == "rm":
            raise PermissionError("s3:DeleteObject")

    with following(rule):
        saving(tmp_path / "run", url, 2)
    assert steps(tmp_path / "bucket")[-1] == 16
    assert caplog.text.count("cannot be removed from") == 1
    assert "cannot be written to" not in caplog.text


def test_what_a_killed_upload_has_left_is_removed_by_the_next_start(url, tmp_path):
    train(tmp_path / "first", url, 1)
    left = tmp_path / "bucket" / "step-00000006"
    left.mkdir()
    (left / "model.safetensors").write_text("the first half")
    abandoned = tmp_path / "bucket" / "step-00000007"
    abandoned.mkdir()
    (abandoned / "abandoned.json").write_text("{}")
    train(tmp_path / "second", url, 2)
    assert not left.exists()
    assert abandoned.exists()
    for path in committed(tmp_path / "bucket"):
        verify(path)


# -- the end ---------------------------------------------------------------------------------------


class Stop(Callback):
    """Lets a signal arrive, on one rank."""

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 6 and trainer.accelerator.process_index == 1:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("signalled", [False, True])
def test_all_ranks_wait_for_the_last_upload(signalled, ranks, tmp_path):
    """A launcher ends the others when one has ended, and a fit may be followed by collectives."""

    def run() -> tuple[list[int], list[int]]:
        def rule(kind: str, path: str) -> None:
            if kind == "put" and path.endswith("manifest.json"):
                threading.Event().wait(0.5)  # a slow storage

        more = [Stop()] if signalled else []
        with following(rule), suppress(SystemExit):
            saving(tmp_path / "run", f"storage://{tmp_path}/bucket", 2, *more)
        return steps(tmp_path / "run" / "checkpoints"), steps(tmp_path / "bucket")

    first, second = ranks(2)(run)
    here, there = first
    assert here == there
    assert second == first
    assert (here[-1] < 8) == signalled


# -- URLs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("simplecache::s3://key:word@bucket/run", "password"),
        ("abfs://container/run?sig=abc", "signature"),
        ("nothing://bucket/run", "Protocol not known: nothing"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_where_it_is_given(wrong, message):
    with pytest.raises(ValueError, match=message):
        ModelCheckpoint(mirror=wrong)


def test_a_mirror_that_cannot_be_listed_does_not_hide_that_the_run_has_begun(url, tmp_path):
    train(tmp_path / "first", url, 1)

    def rule(kind: str, path: str) -> None:
        if kind == "connect":
            raise OSError("no route to the host")

    unknown = pytest.raises(
        CheckpointError, match="unknown whether this run has earlier checkpoints"
    )
    with following(rule), unknown:
        train(tmp_path / "second", url, 2)
