"""A process that the others wait for is named with where it is, while they still wait."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import threading
import time
import uuid
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.data import DataLoader

from tests.helpers.megatron import cuda_on_cpu, gpt
from trainer import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    ParallelismConfig,
    PartialState,
    Trainer,
    TrainModule,
)
from trainer.distributed import guards, watchdog
from trainer.distributed.collectives import Trigger
from trainer.distributed.objects import all_gather_object, broadcast_object
from trainer.distributed.watchdog import Note, complaint, unexplained, watched
from trainer.errors import CheckpointError


class Line(TrainModule):
    """Stands still once, at a place of its choice."""

    def __init__(self, place, stand):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.place, self.stand = place, stand

    def at(self, place, batch_idx=None):
        if (place, batch_idx) == self.place:
            self.stand()

    def training_step(self, batch, batch_idx):
        self.at("train", batch_idx)
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.at("validation", batch_idx)

    def predict_step(self, batch, batch_idx):
        self.at("predict", batch_idx)
        return batch

    def setup(self, stage):
        self.at("setup")

    def on_train_epoch_end(self):
        self.at("epoch end")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Listener(logging.Handler):
    """Keeps the warnings of the watchdog, and calls back at each."""

    def __init__(self, heard):
        super().__init__()
        self.texts, self.heard = [], heard

    def emit(self, record):
        self.texts.append(record.getMessage())
        self.heard()


@contextmanager
def listening(heard, patience=0.6):
    listener, logger = Listener(heard), logging.getLogger(watchdog.__name__)
    logger.addHandler(listener)
    before, watchdog._PATIENCE = watchdog._PATIENCE, patience
    try:
        yield listener.texts
    finally:
        watchdog._PATIENCE = before
        logger.removeHandler(listener)


class Split(Line):
    """Its layer is split over the processes."""

    tp_plan = {"layer": ColwiseParallel(output_layouts=Replicate())}

    def __init__(self, place, stand):
        super().__init__(place, stand)
        self.layer = torch.nn.Linear(1, 2)


class Stages(Line):
    """A GPT of megatron-core, whose stages are on different processes."""

    plugin = None

    def configure_model(self):
        self.layer = gpt(self.plugin.transformer_arguments("no"))

    def training_step(self, batch, batch_idx):
        self.at("train", batch_idx)
        tokens, mask = batch.expand(-1, 8).long(), torch.ones(8, 8, dtype=torch.bool).triu(1)
        return self.layer(tokens, torch.arange(8)[None], mask[None, None], labels=tokens).mean()


ENGINES = {  # the module, and the arguments of its trainer, made in each process
    "DDP": (Line, dict),
    "FSDP": (Line, lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()}),
    "ZeRO-3": (Line, lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3)}),
    "tensor parallel": (Split, lambda: {"parallelism_config": ParallelismConfig(tp_size=2)}),
    "stages": (
        Stages,
        lambda: {"megatron_lm_plugin": MegatronLMPlugin(pp_degree=2, gradient_clipping=0.0)},
    ),
}


def stalled(place, how="stand", stage="fit", engine="DDP"):
    """The warnings of each process while the last one stands still, which ends with the first.

    Those before and after are left out: on a busy machine, each process may be slow anywhere.
    """
    rank, size = PartialState(cpu=True).process_index, dist.get_world_size()
    store = dist.group.WORLD.get_group_store()
    name = [f"stalled/{uuid.uuid4()}", os.getpid()]
    names = [None] * size
    dist.all_gather_object(names, name)
    key, stander = names[0][0], names[-1][1]
    warned, here, kept = f"{key}/warned", [f"{key}/{each}" for each in range(size)], []

    def heard():
        if not store.check(here) or store.check([warned]):
            return
        kept.append(texts[-1])
        if how == "stop":
            os.kill(stander, signal.SIGCONT)
        store.set(warned, "")

    def stand_here():
        store.set(here[rank], "")
        if rank != size - 1:
            return  # a first stage must go on for the last one to come here
        store.wait(here, timedelta(seconds=50))
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        store.wait([warned], timedelta(seconds=50))

    settings = {"max_epochs": 1, "progress_bar": False, "cpu": True, "num_sanity_val_steps": 0}
    kind, options = ENGINES[engine]
    loader = DataLoader(torch.zeros(6 * size, 1), 1)
    with cuda_on_cpu() if engine == "stages" else nullcontext(), listening(heard) as texts:
        settings |= options()
        trainer = Trainer(project_dir="run", checkpointing=False, **settings)
        module = kind(place, stand_here)
        module.plugin = settings.get("megatron_lm_plugin")
        if stage == "fit":
            trainer.fit(module, loader, loader)
        else:
            getattr(trainer, stage)(module, loader)
    return kept


@pytest.mark.parametrize(
    ("place", "stage", "where"),
    [
        (("train", 2), "fit", "fit, epoch 1, after update 2, batch 2"),
        (("validation", 3), "fit", "fit, epoch 1, after update 6, validation batch 3"),
        (("epoch end", None), "fit", "fit, epoch 1, after update 6"),
        (("setup", None), "fit", "fit, outside its loop"),
        (("predict", 1), "predict", "predict, batch 1"),
    ],
)
def test_a_stalled_rank_is_named_with_its_place_and_stack(ranks2, place, stage, where):
    first, second = ranks2(stalled, place, "stand", stage)
    assert second == []  # the one who waits speaks
    assert first[0].startswith("rank 0 has waited for ")
    assert f"\nrank 1 has been in {where}" in first[0]
    assert first[0].count("in stand_here") == 1
    assert "store.wait([warned]" in first[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stalled_rank_is_named_on_every_engine(ranks2, engine):
    (text,), others = ranks2(stalled, ("train", 1), "stand", "fit", engine)
    assert others == []
    assert text.startswith("rank 0 has waited for ")
    assert "\nrank 1 has been in fit, epoch 1, after update 1" in text
    assert "in stand_here" in text
    first, _ = ranks2(stalled, ("train", 1), "stop", "fit", engine)
    assert "\nrank 1 does not respond; it was last in fit, " in first[0]
    if engine == "stages":
        ranks2.kill()  # megatron-core never frees its groups, whose threads slow all later tests


def wait_for(file):
    while not file.exists():
        time.sleep(0.01)


@contextmanager
def silent_store():
    """The store answers nobody, as one on a machine that is gone."""
    store = dist.group.WORLD.get_group_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    with open(store.path) as file:  # that of the ranks here is a file, which whoever asks locks
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_one_of_several_waiting_ranks_reports(ranks3):
    first, *others = ranks3(stalled, ("train", 1))
    assert others == [[], []]
    assert first[0].startswith("ranks 0, 1 have waited for ")
    assert (
        " seconds, in fit, epoch 1, after update 1, batch 1:\nrank 2 has been in fit, " in first[0]
    )


def test_a_rank_outside_the_run_is_named(ranks2):
    def alone():
        store = dist.group.WORLD.get_group_store()
        key = f"said/{os.getppid()}/{dist.get_world_size()}"
        with listening(lambda: store.set(key, "said")) as texts:
            if dist.get_rank() == 1:
                store.wait([key], timedelta(seconds=50))
            with watched(lambda: "here"):
                dist.barrier()
        store.delete_key(key) if dist.get_rank() == 0 else None
        return texts

    first, second = ranks2(alone)
    assert "rank 1 is not in this run: it has finished, or has not started." in first[0]
    assert second == []


def test_a_run_that_makes_progress_logs_nothing(ranks2):
    def fit():
        with listening(lambda: None, patience=30.0) as texts:
            settings = {"max_epochs": 2, "progress_bar": False, "cpu": True}
            trainer = Trainer(project_dir="run", checkpointing=False, **settings)
            threads = []
            module = Line(("train", 3), lambda: threads.extend(threading.enumerate()))
            trainer.fit(module, DataLoader(torch.zeros(12, 1), 1))
        names = [thread.name for thread in threads]
        left = [thread.name for thread in threading.enumerate()]
        return texts, names.count("cadence-watchdog"), left.count("cadence-watchdog")

    assert ranks2(fit) == [([], 2, 0)] * 2  # one in each epoch


def test_one_process_has_no_watchdog():
    with watched(lambda: "here"):
        assert "cadence-watchdog" not in [thread.name for thread in threading.enumerate()]


# -- what is said ----------------------------------------------------------------------------------

HERE = Note("step 3", True, 31.0, True, "  in backward\n", 9)
BUSY = Note("step 3", True, 31.0, False, "  in read\n", 9)


def test_a_slow_rank_that_makes_progress_is_not_named():
    slow = BUSY._replace(seconds=14.0, stack="")
    assert complaint(0, [HERE, slow], set(), 30.0) is None
    assert complaint(0, [HERE, slow._replace(seconds=15.0)], set(), 30.0) is not None


def test_waiting_and_unresponsive_ranks_are_distinguished():
    assert complaint(1, [BUSY, HERE, HERE], set(), 30.0) == (
        "ranks 1, 2 have waited for 31 seconds, in step 3:\n"
        "rank 0 has been in step 3 for 31 seconds:\n  in read\n"
    )
    text = complaint(2, [BUSY, HERE, HERE], {1}, 30.0)
    assert text is not None
    assert "rank 1 does not respond; it was last in step 3." in text


def test_a_rank_counts_as_waiting_while_it_reads_the_result_of_an_exchange(ranks2):
    # NCCL's calls return before the others have come: the process waits where it reads.
    def waits_in_each() -> list[bool]:
        marked, found = [], []
        read = torch.Tensor.cpu

        def cpu(tensor):
            marked.append(threading.get_ident() in guards.waiting.threads)
            return read(tensor)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "cpu", cpu)
            for exchange in (all_gather_object, broadcast_object, lambda _: Trigger().check()):
                exchange("text")
                found.append(bool(marked) and all(marked))
                marked.clear()
        return found

    assert ranks2(waits_in_each) == [[True, True, True]] * 2


def test_ranks_that_all_wait_are_reported_later():
    assert complaint(0, [HERE, HERE], set(), 30.0) is None
    late = HERE._replace(seconds=120.0)
    assert complaint(0, [late, late._replace(phase="step 4")], set(), 30.0) == (
        "No process has made progress for 120 seconds:\n"
        "rank 0 is in step 3:\n  in backward\n\nrank 1 is in step 4:\n  in backward\n"
    )


FAILED = Note("step 3", failure="ValueError: of its own")


def test_a_failed_rank_is_named_to_those_who_wait_for_it():
    assert complaint(0, [HERE, FAILED], set(), 30.0) == (
        "rank 0 has waited for 31 seconds, in step 3:\n"
        "rank 1 has failed in step 3: ValueError: of its own"
    )


def test_an_unexplained_failure_lists_the_last_places_of_the_ranks():
    text = unexplained("step 4", {0: HERE, 2: Note("step 5")}, "RuntimeError: closed")
    assert (
        "This process was in step 4; the others, some seconds earlier: rank 0 in step 3. The"
        in text
    )
    assert text.endswith("The backend reports: RuntimeError: closed")
    many = unexplained("step 4", dict.fromkeys(range(1, 12), BUSY), "")
    assert "the others, some seconds earlier: rank 1 in step 3; rank 2 " in many
    assert "; rank 8 in step 3; 3 more. The" in many
    assert "the others, some seconds earlier: none." in unexplained("step 4", {}, "")


def ends(error=None):
    """How a run ends that fails so, for whoever called it."""
    try:
        with watched(lambda: "here") as note_place:
            try:
                if callable(error):
                    error()
                elif error is not None:
                    raise error
            except BaseException:
                note_place()
                raise
    except Exception as caught:  # noqa: BLE001 - whatever it has become
        return type(caught).__name__, str(caught)
    return "nothing", ""


def closed():
    return RuntimeError("[x/gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def test_the_first_failure_is_the_cause(ranks2):
    def one_after_the_other():
        rank = dist.get_rank()
        messages = [ends(ValueError("of both"))]  # on all processes alike
        dist.barrier()
        messages.append(ends(closed()))  # nobody has said why
        for error in (ValueError("of its own"), OSError("gloo/data")):
            dist.barrier()
            if rank == 1:
                messages.append(ends(error))
            dist.barrier()
            if rank == 0:
                messages.append(ends(closed()))
            dist.barrier()
        wrapped = CheckpointError("in the background")
        wrapped.__cause__ = closed()
        messages.append(ends(wrapped))  # it stays what it is
        return messages

    first, second = ranks2(one_after_the_other)
    assert first[0] == second[0] == ("ValueError", "of both")
    for kind, text in (first[1], second[1]):
        assert kind == "RuntimeError"
        assert text.startswith("Communication with the other processes failed")
        assert text.endswith("The backend reports: RuntimeError: " + str(closed()))
    failed = "Rank 1 failed while the others waited for it, in here: "
    assert first[2] == ("RuntimeError", f"{failed}ValueError: of its own")
    assert first[3] == ("RuntimeError", f"{failed}OSError: gloo/data")
    assert second[2:4] == [("ValueError", "of its own"), ("OSError", "gloo/data")]
    assert first[4] == second[4] == ("CheckpointError", "in the background")


def lost_with_the_store():
    watching, silent, ended = Path("watching"), Path("silent"), Path("ended")

    def lose():
        watching.touch()
        wait_for(silent)
        raise closed()

    messages = []
    with listening(lambda: None):
        if dist.get_rank() == 1:
            wait_for(watching)
            with silent_store():
                silent.touch()
                wait_for(ended)
        else:
            messages = ends(lose)
            ended.touch()
    dist.barrier()
    if dist.get_rank() == 1:
        ends()  # as many runs on each
    return messages


def test_a_backend_failure_reports_the_lost_store(ranks2):
    kind, text = ranks2(lost_with_the_store)[0]
    assert kind == "RuntimeError"
    assert "that of rank 0, has failed or cannot be reached. This process was in here. " in text
    assert text.endswith("The backend reports: RuntimeError: " + str(closed()))


def test_the_watchdog_reports_before_the_group_times_out(ranks2):
    def patience():
        watching = watchdog._Watchdog(lambda: "here")
        limit = dist.group.WORLD.get_group_store().timeout.total_seconds()
        return watching._patience, min(30.0, limit / 4)

    for found, expected in ranks2(patience):
        assert found == expected
