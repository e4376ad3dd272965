"""Saves in the background, saves that fail, and the kinds of checkpoints, with the real Trainer."""

import errno
import json
import os
import shutil
import signal
import threading
from collections import namedtuple
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from callbacks import Callback, ModelCheckpoint
from trainer import ProjectConfiguration, Trainer, TrainModule
from trainer.checkpoint.async_writer import HostCopies, Writer
from trainer.checkpoint.parts import StatePart, tree_part, weights_part
from trainer.checkpoint.serialization import load_tree
from trainer.checkpoint.storage import checkpoint_name, committed, open_staging, step_of, verify
from trainer.checkpoint.weights import load_weights
from trainer.errors import CheckpointError, Preempted
from trainer.state import PartialState

save_module = import_module("trainer.checkpoint.save")  # the package has the function
FOLDERS = ("background", "blocking")
LIMIT = 60  # seconds until a thread that waits in vain gives up


class Net(TrainModule):
    def __init__(self, fail_at=None):
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
        self.head = torch.nn.Linear(5, 1)
        self.fail_at = fail_at

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == self.fail_at:
            raise ArithmeticError("the user's own")
        loss = self.head(torch.dropout(self.net(batch[0]), 0.2, True)).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("seen", self.head.weight.sum())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def loader(batches=12):
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(4 * batches, 3, generator=generator)), batch_size=4)


def make(folder, *callbacks, **arguments):
    arguments = {"max_epochs": 1, "log_every": 1, "seed": 3} | arguments
    return Trainer(
        callbacks=list(callbacks), project_dir=folder, progress_bar=False, cpu=True, **arguments
    )


def fit(folder, *callbacks, module=None, data=None, ckpt_path=None, **arguments):
    trainer = make(folder, *callbacks, **arguments)
    trainer.fit(module or Net(), loader() if data is None else data, ckpt_path=ckpt_path)
    return trainer


def steps_in(folder):
    return [step_of(path) for path in committed(Path(folder) / "checkpoints")]


class At(Callback):
    """Calls functions at the boundaries of some updates."""

    def __init__(self, calls):
        self.calls = calls

    def on_boundary(self, trainer, module):
        self.calls.get(trainer.global_step, lambda: None)()


@pytest.fixture
def gate(monkeypatch):
    """Saves begin only when it is open."""
    opened, real = threading.Event(), save_module.open_staging

    def wait(target, **options):
        assert opened.wait(LIMIT)
        return real(target, **options)

    monkeypatch.setattr(save_module, "open_staging", wait)
    yield opened
    opened.set()


# -- in the background -----------------------------------------------------------------------------


def files_of(checkpoint):
    read = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    del read["manifest.json"], read["record.json"]  # hashes of the rest, and of a file with times
    state = json.loads(read["trainer.json"])["tree"]
    state["counters"].pop("seconds")
    state["run_id"] = None
    return read | {"trainer.json": json.dumps(state).encode()}


def assert_same_files(one, other):
    saved, expected = files_of(one), files_of(other)
    assert saved.keys() == expected.keys()
    for file in saved:
        if file != "trainer.json":
            assert saved[file] == expected[file], file
    return saved


def test_a_background_save_holds_the_state_of_its_update(monkeypatch):
    begins, real = threading.Semaphore(0), save_module.open_staging

    def wait(target, **options):
        assert begins.acquire(timeout=LIMIT)
        return real(target, **options)

    # Each save begins two updates after the one that it holds, the last one at once.
    at = At({6: begins.release, 10: begins.release, 12: begins.release})
    with monkeypatch.context() as patched:
        patched.setattr(save_module, "open_staging", wait)
        fit("background", at, ModelCheckpoint(every=4, save_top_k=-1))
    fit("blocking", At({}), ModelCheckpoint(every=4, save_top_k=-1, background=False))
    assert steps_in("background") == steps_in("blocking") == [4, 8, 12]
    for step in (4, 8, 12):
        one, other = (Path(f, "checkpoints", checkpoint_name(step)) for f in FOLDERS)
        verify(one)
        assert_same_files(one, other)


def test_one_save_is_in_flight_and_removals_come_after_the_commit(monkeypatch):
    events = []

    def traced(name):
        real = getattr(save_module, name)

        def call(*arguments, **options):
            events.append((name, threading.current_thread().name))
            return real(*arguments, **options)

        return call

    for name in ("open_staging", "commit", "remove"):
        monkeypatch.setattr(save_module, name, traced(name))
    fit("run", ModelCheckpoint(every=4))
    names = [name for name, _ in events]
    assert names == ["open_staging", "commit", *["open_staging", "commit", "remove"] * 2]
    assert {thread for _, thread in events} == {"cadence-save"}
    assert steps_in("run") == [12]


def test_fit_returns_when_all_is_written(gate):
    class Release(Callback):
        def on_train_end(self, trainer, module):
            assert steps_in("run") == []
            gate.set()

    trainer = fit("run", Release(), ModelCheckpoint(every=12))
    assert steps_in("run") == [12]
    assert trainer.wait_for_save()


def test_the_users_error_waits_for_the_save_in_flight(gate):
    class Release(Callback):
        def on_exception(self, trainer, module, exception):
            gate.set()

    with pytest.raises(ArithmeticError, match="the user's own"):
        fit("run", Release(), ModelCheckpoint(every=4), module=Net(fail_at=5))
    assert steps_in("run") == [4]


def test_an_interrupt_does_not_wait_for_the_save_in_flight(gate, caplog):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit("run", At({6: interrupt}), ModelCheckpoint(every=4))
    assert "it is abandoned" in caplog.text
    gate.set()  # so that the thread ends with this test
    for thread in threading.enumerate():
        if thread.name == "cadence-save":
            thread.join(LIMIT)


def test_a_save_after_the_fit_is_there_when_the_call_returns():
    trainer = fit("run")
    path = trainer.save_checkpoint("elsewhere/step-00000012", background=True)
    assert verify(path)["step"] == 12


def test_host_copies_stay_and_their_memory_is_used_again(tmp_path):
    copies, weight = HostCopies(), torch.arange(6.0).reshape(2, 3)
    state = {"weight": weight, "tied": weight, "half": torch.ones(2, dtype=torch.bfloat16)}
    write = copies.hold([weights_part(state), tree_part({"w": weight.T, "n": 1}, "tree")])
    memory = {key: tensor.data_ptr() for key, tensor in copies._kept.items()}
    expected = weight.clone()
    weight.zero_()
    write(tmp_path)
    assert torch.equal(load_weights(tmp_path)["tied"], expected)
    assert torch.equal(load_tree(tmp_path, "tree")["w"], expected.T)
    copies.hold([weights_part(state), tree_part({"w": weight.T}, "tree")])
    assert {key: tensor.data_ptr() for key, tensor in copies._kept.items()} == memory
    write = copies.hold([weights_part({"half": torch.ones(3)})])  # of another shape and type
    (tmp_path / "second").mkdir()
    write(tmp_path / "second")
    torch.testing.assert_close(load_weights(tmp_path / "second"), {"half": torch.ones(3)})


def test_a_background_save_waits_for_the_stream_of_each_device_it_copies_from(monkeypatch):
    """An event that is recorded without a stream is in that of the current device."""
    waited = []

    class Event:
        def __init__(self, device, enable_timing):
            assert not enable_timing

        def record(self, stream):
            self.stream = stream

        def synchronize(self):
            waited.append(self.stream)

    def tensor(*device):
        return SimpleNamespace(device=torch.device(*device))

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"of {device}")
    monkeypatch.setattr(HostCopies, "_copy", staticmethod(lambda *_: None))
    of_devices = {"a": tensor("cuda", 0), "b": tensor("cuda", 1), "c": tensor("cuda", 1)}
    tensors = of_devices | {"host": tensor("cpu")}
    HostCopies().hold([StatePart(tensors, lambda values, folder: None, [])])(Path())
    assert sorted(waited) == ["of cuda:0", "of cuda:1"]


@pytest.mark.gpu
def test_a_background_save_has_the_values_of_its_moment_from_each_device(tmp_path):
    """Also of the last device, where there are several, while the first is the current one."""
    devices = [torch.device("cuda", number) for number in (0, torch.cuda.device_count() - 1)]
    weights = {f"w{n}": torch.zeros(1 << 20, device=each) for n, each in enumerate(devices)}
    copies = HostCopies()
    for number in (1, 2):  # the second reuses the memory of the first
        for weight in weights.values():
            with torch.cuda.device(weight.device):
                torch.cuda._sleep(10**8)  # the device is behind
            weight.fill_(number)
        write = copies.hold([weights_part(weights)])
        for weight in weights.values():
            weight.fill_(-1)
        (tmp_path / str(number)).mkdir()
        write(tmp_path / str(number))
        for weight in load_weights(tmp_path / str(number)).values():
            assert weight.eq(number).all()


def test_a_writer_refuses_a_second_save_and_reports_how_the_latest_ended(caplog):
    writer, going_on = Writer(PartialState()), threading.Event()
    writer.start(lambda group: going_on.wait(LIMIT))
    with pytest.raises(RuntimeError, match="in progress"):
        writer.start(lambda group: None)
    going_on.set()
    assert writer.wait()

    def fail(group):
        raise ValueError("torn")

    writer.start(fail, required=False)
    assert not writer.wait()
    assert not writer.wait()  # also when it is asked again
    assert caplog.text.count("torn") == 1
    assert not writer.failed
    writer.start(fail)
    with pytest.raises(CheckpointError, match="A background save failed: ValueError"):
        writer.wait()
    assert not writer.failed
    assert not writer.wait()


def test_the_saving_thread_uses_the_device_of_the_process(monkeypatch):
    made_current = []

    def note(index):
        made_current.append((threading.current_thread().name, index))

    monkeypatch.setattr(torch.accelerator, "set_device_index", note)
    state = PartialState()
    state.__dict__["device"] = torch.device("cuda", 1)
    writer = Writer(state)
    writer.start(lambda group: None)
    assert writer.wait()
    assert made_current == [("cadence-save", 1)]
    writer.start(lambda group: None, background=False)  # the caller's thread stays where it is
    assert len(made_current) == 1


# -- saves that fail -------------------------------------------------------------------------------


def full_at(monkeypatch, *steps):
    """The disk is full when these updates are saved."""
    real = save_module.commit

    def refuse(staging, target, *described):
        if step_of(target) in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(staging, target, *described)

    monkeypatch.setattr(save_module, "commit", refuse)


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_ends_the_run_and_the_earlier_checkpoint_stays(monkeypatch, background):
    full_at(monkeypatch, 8)
    saver, seen = ModelCheckpoint(every=4, background=background), []

    class Watch(Callback):
        def on_train_step_start(self, trainer, module):
            seen.append(trainer.global_step)
            if background and trainer.global_step == 8:  # the error is known by now
                for thread in threading.enumerate():
                    if thread.name == "cadence-save":
                        thread.join(LIMIT)

    with pytest.raises(CheckpointError, match=r"step-00000008.*\n?.*is full.*save_top_k"):
        fit("run", Watch(), saver)
    assert seen[-1] == (8 if background else 7)
    assert os.listdir("run/checkpoints") == ["step-00000004"]
    monkeypatch.undo()
    trainer = fit("run", ModelCheckpoint(every=4), ckpt_path="auto")
    assert trainer.global_step == 12


@pytest.mark.parametrize("background", [True, False])
def test_on_save_error_warn_continues_the_run(monkeypatch, caplog, background):
    full_at(monkeypatch, 6, 9)
    saver = ModelCheckpoint(
        every=3, save_top_k=2, background=background, on_save_error="warn", save_last=2
    )
    fit("run", saver)
    assert caplog.text.count("continues without this checkpoint") == 2
    assert sorted(os.listdir("run/checkpoints")) == ["step-00000003", "step-00000012"]
    assert [path.name for path in saver.best_k_models] == ["step-00000012", "step-00000003"]
    assert saver.last_model_path.name == "step-00000012"


def test_a_full_disk_is_an_error_before_the_first_update_and_before_each_save(monkeypatch):
    usage = namedtuple("usage", "total used free")
    free = [10**12]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, free[0]))

    def fill():
        free[0] = 100

    with pytest.raises(CheckpointError, match=r"takes 0.0 MB, but 0.0 MB are free in ") as error:
        fit("second", At({5: fill}), ModelCheckpoint(every=4, background=False))
    assert error.value.__cause__ is None  # which would print the same message
    assert os.listdir("second/checkpoints") == ["step-00000004"]

    updates = []
    with pytest.raises(CheckpointError, match="are free in"):
        fit("first", At({step: lambda: updates.append(1) for step in range(13)}), ModelCheckpoint())
    assert updates == []
    assert not Path("first/checkpoints").exists()


def test_little_disk_space_is_warned_of_before_the_first_update(monkeypatch, caplog):
    usage = namedtuple("usage", "total used free")
    module = Net()
    module.more = torch.nn.Linear(100, 100)  # 40 kB of weights, so Adam's moments have 80 kB
    free = [80_000]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, free[0]))

    def grow():
        free[0] = 10**12

    fit("run", At({1: grow}), ModelCheckpoint(), module=module)
    assert "may not be enough space" in caplog.text
    assert steps_in("run") == [12]


def test_state_that_cannot_be_saved_is_an_error_at_its_own_update():
    class Odd(Callback):
        def state_dict(self):
            return {"odd": object()}

    with pytest.raises(CheckpointError, match=r"trainer\['callbacks'\]\['.*Odd'\]\['odd'\]"):
        fit("run", Odd(), ModelCheckpoint(every=4))
    assert not Path("run/checkpoints").exists()


# -- what is saved ---------------------------------------------------------------------------------


def test_weights_only_checkpoints_are_evaluated_but_not_resumed():
    saver = ModelCheckpoint(every=4, save_weights_only=True, dirpath="run/weights")
    trainer = fit("run", saver)
    path = saver.best_model_path
    assert sorted(os.listdir(path)) == ["manifest.json", "model.safetensors"]
    assert verify(path)["weights_only"] is True
    (seen,) = trainer.validate(Net(), loader(1), ckpt_path=path)
    assert seen["seen"] == pytest.approx(trainer.module.head.weight.sum().item())
    with pytest.raises(CheckpointError, match="only weights"):
        fit("run", saver, ckpt_path="auto")


def test_on_exception_saves_weights_that_no_run_resumes(caplog):
    module = Net(fail_at=6)
    with pytest.raises(ArithmeticError):
        fit("run", ModelCheckpoint(every=4, on_exception=True), module=module)
    path = Path("run/checkpoints/exception-00000006-rank-00000")
    assert str(path) in caplog.text
    assert verify(path)["step"] == 6
    saved = load_weights(path)
    assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())
    trainer = fit("run", ModelCheckpoint(every=4), ckpt_path="auto")
    assert trainer.global_step == 12
    assert path.is_dir()  # nor does another run remove them

    with pytest.raises(ArithmeticError):
        fit("quiet", ModelCheckpoint(every=4), module=Net(fail_at=6))
    assert os.listdir("quiet/checkpoints") == ["step-00000004"]


# -- damage ----------------------------------------------------------------------------------------


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def of_version(number):
    def write(path):
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps(manifest | {"format_version": number}))

    return write


DAMAGES = [
    *((damage, file) for damage in (truncate, flip, Path.unlink) for file in (
        "model.safetensors", "optimizer.json", "optimizer.safetensors", "trainer.json",
        "record.json", "rank-00000.json", "rank-00000.safetensors", "manifest.json",
    )),
    (of_version(0), "manifest.json"),
]  # fmt: skip  # a table


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    fit(folder / "run", ModelCheckpoint(every=4, save_top_k=-1))
    return folder / "run"


@pytest.mark.parametrize(("damage", "file"), DAMAGES)
def test_damage_is_detected_and_auto_takes_the_newest_sound_one(sound, caplog, damage, file):
    shutil.copytree(sound, "run")
    newest = Path("run/checkpoints/step-00000012")
    damage(newest / file)
    with pytest.raises(CheckpointError) as caught:
        fit("other", ckpt_path=newest)
    assert str(newest / file) in str(caught.value)
    caplog.clear()
    chosen = make("run", max_epochs=2)._context.folders.choose("auto")
    assert chosen == Path("run/checkpoints/step-00000008").absolute()
    assert f"{newest} is not used" in caplog.text
    assert file in caplog.text


# -- what a resume meets ---------------------------------------------------------------------------


def test_an_evaluation_beside_the_training_leaves_its_save_alone():
    fit("run", ModelCheckpoint(every=4))
    staging = open_staging(Path("run/checkpoints/step-00000016"))  # of a save in flight
    make("run").validate(Net(), loader(1), ckpt_path="last")
    assert staging.is_dir()
    fit("run", ModelCheckpoint(every=4), ckpt_path="auto")
    assert not staging.exists()


def test_files_of_the_user_in_a_checkpoint_are_not_deleted_with_it(caplog):
    def write():
        Path("run/checkpoints/step-00000004/notes.txt").write_text("mine")

    fit("run", At({6: write}), ModelCheckpoint(every=4, background=False))
    assert Path("run/checkpoints/step-00000004/notes.txt").read_text() == "mine"
    assert "holds files that are not the checkpoint's (notes.txt)" in caplog.text
    assert steps_in("run") == [4, 12]


def test_another_batch_size_inside_an_epoch_is_refused():
    other = DataLoader(loader().dataset, batch_size=8)
    with pytest.raises(ArithmeticError):
        fit("run", ModelCheckpoint(every=4), module=Net(fail_at=6))
    with pytest.raises(
        CheckpointError, match=r"batches of 4 of 48 samples.*has batches of 8 of 48"
    ):
        fit("run", data=other, ckpt_path="auto")
    fit("whole")
    trainer = fit(
        "whole", data=other, max_epochs=2, ckpt_path="auto"
    )  # at an epoch's end it may be
    assert trainer.global_step == 12 + 6


def test_another_batch_size_inside_a_pass_of_a_stream_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(row,) for row in torch.ones(24, 3)])

    def run(size, steps):
        data = DataLoader(Stream(), size)
        fit("run", data=data, max_epochs=None, max_steps=steps, ckpt_path="auto")

    run(4, 2)
    with pytest.raises(CheckpointError, match=r"batches of 4, but .* now has batches of 6\."):
        run(6, 4)
    run(4, 4)


class Buckets:
    """Makes batches of its own, without saying their size: in odd epochs of twice the size."""

    def __init__(self, size, *, known="at once"):
        self.size, self.known, self.epoch = size, known, 0
        self.batches = self.made()

    def set_epoch(self, epoch):
        self.epoch = epoch
        if self.known == "at once":
            self.batches = self.made()

    def made(self):
        size = self.size * (1 + self.epoch % 2)
        return [list(range(at, at + size)) for at in range(0, 24, size)]

    def __len__(self):
        if self.known == "never":
            raise TypeError("unknown")
        return len(self.batches)

    def __iter__(self):
        self.batches = self.made()
        return iter(self.batches)


def bucketed(steps, batches, **limits):
    data = DataLoader(TensorDataset(torch.ones(24, 3)), batch_sampler=batches)
    options = {"data": data, "max_steps": steps, "max_epochs": 3, "ckpt_path": "auto"}
    return fit("run", **options, **limits).global_step


def test_another_number_of_batches_of_unknown_size_inside_an_epoch_is_refused():
    bucketed(2, Buckets(4))
    with pytest.raises(CheckpointError, match=r"in 6 batches of 24.*now has 12 batches of 24 sam"):
        bucketed(8, Buckets(2))
    with pytest.raises(CheckpointError, match=r"in 6 batches of 24.*now has 3 batches of 24 sam"):
        bucketed(8, Buckets(8))
    assert bucketed(6, Buckets(4), limit_train_batches=5) == 6  # a limit is not the data's
    assert bucketed(8, Buckets(4, known="never"), limit_train_batches=5) == 8


@pytest.mark.parametrize("known", ["at once", "when begun"])
def test_the_number_of_batches_may_change_from_epoch_to_epoch(known):
    for steps in (7, 10, 15):  # inside the second and the third epoch, and at the end
        assert bucketed(steps, Buckets(4, known=known)) == steps


def test_a_sound_checkpoint_in_another_folder_is_found_where_one_is_damaged():
    best = ModelCheckpoint(every=4, save_top_k=-1, dirpath="best")
    fit("run", ModelCheckpoint(every=6), best)
    flip(Path("run/checkpoints/step-00000012/model.safetensors"))
    truncate(Path("best/step-00000012/model.safetensors"))
    trainer = make("run", ModelCheckpoint(), ModelCheckpoint(every=4, dirpath="best"))
    assert trainer._context.folders.choose("auto") == Path("best/step-00000008").absolute()


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_a_dirpath_that_cannot_be_written_to_is_refused_before_the_training(tmp_path, kind):
    place = tmp_path / "place"
    if kind == "file":
        place.touch()
    else:
        place.symlink_to(tmp_path / "nowhere")
    trained = []
    started = At({1: lambda: trained.append(1)})
    with pytest.raises(CheckpointError, match="place is not a folder that this user can write to"):
        fit("run", started, ModelCheckpoint(dirpath=place))
    assert not trained


def test_a_checkpoint_that_a_killed_save_had_set_aside_is_resumed_by_its_path():
    fit("run", ModelCheckpoint(every=6, save_top_k=-1))
    path = Path("run/checkpoints/step-00000006")
    path.rename(path.with_name(f".cadence-replaced-{path.name}"))
    assert fit("other", ckpt_path=path).global_step == 12


def test_a_full_disk_when_a_signal_comes_does_not_hide_the_signal(monkeypatch):
    full_at(monkeypatch, 6)
    messages = At({5: lambda: signal.raise_signal(signal.SIGTERM)})
    with pytest.raises(Preempted) as ended:
        fit("run", messages, ModelCheckpoint(every=4, on_save_error="warn"))
    assert ended.value.code == 143
    assert str(ended.value) == "the run was ended by SIGTERM (exit code 143)"
    assert steps_in("run") == [4]


# -- several processes -----------------------------------------------------------------------------


def test_a_hook_that_fails_on_one_rank_while_saving_ends_the_run_on_all(ranks2):
    class Odd(Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            if trainer.accelerator.process_index == 1:
                raise LookupError("mine")

    def body():
        with pytest.raises(CheckpointError, match=r"on rank 1: LookupError\('mine'\)"):
            fit("run", Odd(), ModelCheckpoint(every=2))
        return True

    assert ranks2(body, timeout=60) == [True, True]


def test_more_processes_than_saved_draw_numbers_of_their_own(ranks3):
    class Draw(Callback):
        def __init__(self):
            self.drawn = []

        def on_train_step_end(self, trainer, module):
            self.drawn.append(torch.rand(1).item())

    with pytest.raises(ArithmeticError):
        fit("run", ModelCheckpoint(every=3), module=Net(fail_at=5))

    def body():
        draw = Draw()
        fit("run", draw, ckpt_path="auto")
        return draw.drawn

    drawn = ranks3(body)
    assert len({number for each in drawn for number in each}) == sum(map(len, drawn))


def test_a_save_that_fails_on_one_rank_ends_the_run_on_all_at_the_same_update(ranks2):
    def body():
        rank, real = PartialState().process_index, Writer.start
        trainer = make("run", ModelCheckpoint(every=2))

        def refuse(folder):
            raise OSError("gone")

        def start(self, work, **options):
            if rank == 1 and trainer.global_step == 4:
                work.keywords["before"] = [refuse]
            real(self, work, **options)

        with mock.patch.object(Writer, "start", start):
            try:
                trainer.fit(Net(), loader())
            except CheckpointError as error:
                return trainer.global_step, str(error), steps_in("run")
        return None

    seen = ranks2(body)
    assert seen[0] == seen[1]
    step, text, left = seen[0]
    assert step in (5, 6)  # the update at which it was known, or the next save, which waits for it
    assert "on rank 1: OSError('gone')" in text
    assert left == [2]


def test_saves_of_two_ranks_in_the_background_equal_blocking_ones(ranks2):
    def body():
        for name, background in zip(FOLDERS, (True, False), strict=True):
            saver = ModelCheckpoint(every=2, save_top_k=-1, background=background)
            fit(name, saver)
        return steps_in("background")

    assert ranks2(body) == [[2, 4, 6]] * 2
    for step in (2, 4, 6):
        one, other = (Path(f, "checkpoints", checkpoint_name(step)) for f in FOLDERS)
        assert "rank-00001.json" in assert_same_files(one, other)


def test_each_machine_keeps_whole_checkpoints_and_goes_on_from_the_newest_that_all_have(ranks2):
    def run(folder, **arguments):
        os.environ["LOCAL_RANK"] = "0"  # as it would be on machines of one process each
        try:
            PartialState._reset_state()
            home = Path(f"machine-{PartialState().process_index}") / folder
            each = ProjectConfiguration(project_dir=str(home), save_on_each_node=True)
            saver = ModelCheckpoint(every=2, save_top_k=-1)
            trainer = fit(None, saver, project_config=each, **arguments)
        finally:
            os.environ["LOCAL_RANK"] = str(PartialState().process_index)
        weights = [tensor.clone() for tensor in trainer.module.state_dict().values()]
        return steps_in(home), sorted(os.listdir(home / "checkpoints/step-00000002")), weights

    def whole():
        return run("run")

    def resumed():
        return run("run", ckpt_path="auto", max_epochs=1)

    for steps, files, _ in ranks2(whole):
        assert steps == [2, 4, 6]
        assert {"rank-00000.json", "rank-00001.json", "model.safetensors"} <= set(files)
    weights = ranks2(lambda: run("again"))[0][2]
    # As much space as a checkpoint takes is enough, with the part of every rank in it.
    taken = sum(
        file.stat().st_size for file in Path("machine-0/run/checkpoints/step-00000006").iterdir()
    )

    def on_a_small_disk():
        usage = namedtuple("usage", "total used free")
        with mock.patch.object(shutil, "disk_usage", return_value=usage(10**12, 0, taken)):
            return run("small")[0]

    assert ranks2(on_a_small_disk) == [[2, 4, 6]] * 2
    shutil.rmtree("machine-0/run/checkpoints/step-00000006")
    shutil.rmtree("machine-1/run/checkpoints/step-00000004")
    for steps, _, again in ranks2(resumed):
        assert steps[-1] == 6
        assert all(torch.equal(a, b) for a, b in zip(again, weights, strict=True))
    # And one process goes on from any of them.
    shutil.copytree("machine-1/run/checkpoints/step-00000002", "alone/checkpoints/step-00000002")
    assert fit("alone", ckpt_path="auto").global_step == 2 + 8  # of 12 batches 4 were seen
