"""The state of several processes in one folder, and in one for each machine."""

from __future__ import annotations

import logging.handlers
import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer import Accelerator
from trainer.checkpoint import main_alone
from trainer.checkpoint.accelerator_state import PreparedObjects, load_state, save_state
from trainer.checkpoint.accelerator_state import load_state as load_project
from trainer.checkpoint.accelerator_state import save_state as save_project
from trainer.checkpoint.storage import verify
from trainer.configuration import FullyShardedDataParallelPlugin, ProjectConfiguration
from trainer.errors import CheckpointError, DistributedOperationException
from trainer.state import PartialState


class Node:
    """A process as it would be on machines of one process each."""

    def __init__(self, state):
        self.is_main_process, self.num_processes = state.is_main_process, state.num_processes
        self.process_index, self.local_process_index = state.process_index, 0
        self.is_local_main_process = True


def make(seed: int) -> PreparedObjects:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return PreparedObjects(
        models=[model], optimizers=[torch.optim.AdamW(model.parameters())], step=seed
    )


def train(prepared: PreparedObjects) -> float:
    loss = prepared.models[0](torch.rand(4, 3)).sum()
    loss.backward()
    prepared.optimizers[0].step()
    prepared.optimizers[0].zero_grad()
    return loss.item()


def outcome(function, *args, **kwargs):
    """What a rank saw: its result, or its error."""
    try:
        return str(function(*args, **kwargs))
    except (CheckpointError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_resumes_its_own_random_state(ranks, size):
    def body():
        state = PartialState()
        prepared = make(1)
        torch.manual_seed(100 + state.process_index)
        random.seed(200 + state.process_index)
        train(prepared)
        path = save_state("out", prepared, state)
        files = sorted(os.listdir("out"))
        expected = [train(prepared), random.random()]
        other = make(2)
        step = load_state("out", other, state)
        return str(path), files, step, expected, [train(other), random.random()]

    seen = ranks(size)(body)
    for path, files, step, expected, found in seen:
        assert (path, step, found) == ("out", 1, expected)
        assert {f"random_states_{rank}.json" for rank in range(size)} < set(files)
        assert "manifest.json" in files
    assert len({values[3][0] for values in seen}) == size
    assert verify(Path("out"))["world_size"] == size


def test_loading_on_fewer_and_more_processes(ranks2, ranks4):
    def save():
        state = PartialState()
        torch.manual_seed(state.process_index)
        save_state("out", PreparedObjects(step=3), state)
        return torch.rand(1).item()

    def load():
        step = load_state("out", PreparedObjects(), PartialState())
        return step, torch.rand(1).item()

    drawn = ranks4(save)
    assert ranks2(load) == [(3, value) for value in drawn[:2]]
    drawn = ranks2(save)
    seen = ranks4(load)
    assert seen[:2] == [(3, value) for value in drawn]
    assert len({value for _, value in seen}) == 4
    assert ranks4(load) == seen  # derived, not drawn


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_raises_on_all_and_changes_nothing(ranks2, rank):
    def body():
        state = PartialState()
        prepared = make(1)
        save_state("out", prepared, state)

        def refuse(*args):
            if state.process_index == rank:
                raise OSError("broken hook")

        prepared.step = 2
        saving = outcome(save_state, "out", prepared, state, hooks=[refuse])
        loading = outcome(load_state, "out", prepared, state, hooks=[refuse])
        other = make(2)
        if state.process_index == rank:
            other.models = [nn.Linear(3, 3)]
        before = other.models[0].bias.tolist()
        misfit = outcome(load_state, "out", other, state)
        unchanged = other.models[0].bias.tolist() == before
        return saving, loading, misfit, unchanged, load_state("out", prepared, state)

    seen = ranks2(body)
    assert seen[0] == seen[1]
    saving, loading, misfit, unchanged, step = seen[0]
    assert saving == f"CheckpointError: Saving out failed on rank {rank}: OSError('broken hook')."
    assert loading == f"CheckpointError: Loading out failed on rank {rank}: OSError('broken hook')."
    assert f"Loading out failed on rank {rank}: Model 0" in misfit
    assert unchanged
    assert step == 1
    assert os.listdir() == ["out"]


def test_all_ranks_use_the_folder_of_rank_0(ranks2):
    def body():
        state = PartialState()
        missing = outcome(load_state, "nothing", PreparedObjects(), state)
        saved = outcome(save_state, f"out-{state.process_index}", PreparedObjects(step=7), state)
        loaded = outcome(load_state, f"out-{state.process_index}", PreparedObjects(), state)
        return missing, saved, loaded

    seen = ranks2(body)
    assert seen[0] == seen[1]
    assert seen[0][0].startswith("ValueError: There is no folder 'nothing'")
    assert seen[0][1:] == ("out-0", "7")
    assert os.listdir() == ["out-0"]
    assert "random_states_1.json" in verify(Path("out-0"))["files"]


def test_save_on_each_node_writes_a_folder_per_machine(ranks2):
    def body():
        node = Node(PartialState())
        home = f"node-{node.process_index}"
        project = ProjectConfiguration(
            project_dir=home, automatic_checkpoint_naming=True, save_on_each_node=True
        )
        for number in range(3):
            torch.manual_seed(node.process_index)
            save_project(None, make(number), node, project)
        files = sorted(os.listdir(f"{home}/checkpoints/checkpoint_0"))
        if node.process_index == 1:  # the newest here is damaged: nobody takes it
            Path(home, "checkpoints/checkpoint_2/model.safetensors").write_bytes(b"x")
        project.iteration = 0
        other = make(9)
        step = load_project(None, other, node, project)
        same = torch.equal(other.models[0].weight, make(1).models[0].weight)
        return files, step, project.iteration, same

    seen = ranks2(body)
    for rank, (files, *rest) in enumerate(seen):
        assert rest == [1, 3, True]  # above the damaged one
        assert "model.safetensors" in files
        assert f"random_states_{rank}.json" in files
        assert f"random_states_{1 - rank}.json" not in files
    assert sorted(os.listdir()) == ["node-0", "node-1"]


def _windows(folder: str, *, save_at: int | None = None, load: bool = False) -> list[float]:
    """A run of 6 micro-batches in windows of 3, alike on any number of processes that divides 4."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = nn.Linear(2, 1)
    model, sgd = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = torch.arange(48.0).reshape(6, 4, 2) / 48
    share = 4 // accelerator.num_processes
    first = accelerator.process_index * share
    if load:
        accelerator.load_state(folder)
    for number in range(save_at if load else 0, 6):
        if number == save_at and not load:
            accelerator.save_state(folder)
        with accelerator.accumulate(model):
            accelerator.backward(model(rows[number, first : first + share]).square().mean())
            sgd.step()
            sgd.zero_grad()
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def test_gradients_of_an_unfinished_window_resume_on_any_number_of_processes(ranks2, ranks4):
    whole, second = ranks2(lambda: _windows("out", save_at=4))
    assert whole == second
    assert ranks2(lambda: _windows("out", save_at=4, load=True)) == [whole, whole]
    for resumed in (
        *ranks4(lambda: _windows("out", save_at=4, load=True)),
        _windows("out", save_at=4, load=True),
    ):
        torch.testing.assert_close(resumed, whole, rtol=1e-5, atol=1e-6)


# -- the main process alone ----------------------------------------------------------------------


def ready(folder: str, **plugins) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    project = ProjectConfiguration(
        project_dir=folder, automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator = Accelerator(cpu=True, project_config=project, **plugins)
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    torch.manual_seed(100 + accelerator.process_index)
    return accelerator, model, optimizer


def update(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    accelerator.backward(model(torch.rand(4, 3)).sum())
    optimizer.step()
    optimizer.zero_grad()


def drawn_after(accelerator: Accelerator, folder: Path) -> float:
    accelerator.load_state(folder)
    return torch.rand(1).item()


def test_the_main_process_saves_alone_and_the_others_are_derived(ranks3, tmp_path, caplog):
    def body():
        accelerator, model, optimizer = ready("project")
        names, weights = [], []
        for _ in range(3):
            update(accelerator, model, optimizer)
            if accelerator.is_main_process:
                names.append(accelerator.save_state().name)
                weights.append(model.module.weight.tolist())
        update(accelerator, model, optimizer)
        names.append(accelerator.save_state().name)  # by all: only the main process has counted
        joint = torch.rand(1).item()
        numbers = accelerator.save_iteration
        kept = Path("project/checkpoints/checkpoint_2")
        alone = [drawn_after(accelerator, kept) for _ in range(2)]
        assert not weights or model.module.weight.tolist() == weights[-1]
        return names, numbers, joint == drawn_after(accelerator, kept.with_name(names[-1])), alone

    found = ranks3(body)
    assert found[0][0] == ["checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_3"]
    assert [(names[-1], number, exact) for names, number, exact, _ in found] == [
        ("checkpoint_3", 4, True)
    ] * 3
    draws = [draw for *_, (draw, again) in found if draw == again]
    assert len(set(draws)) == 3
    kept = {path.name for path in (tmp_path / "project/checkpoints").iterdir()}
    assert kept == {"checkpoint_2", "checkpoint_3"}
    verify(tmp_path / "project/checkpoints/checkpoint_2")


def test_a_save_of_the_main_process_alone_says_that_it_is_inside_a_window(ranks2, tmp_path):
    def body():
        told = logging.handlers.BufferingHandler(99)
        accelerator, model, optimizer = ready("project", gradient_accumulation_steps=2)
        logging.getLogger("trainer").addHandler(told)
        counts = []
        try:
            for _ in range(4):
                with accelerator.accumulate(model):
                    update(accelerator, model, optimizer)
                if accelerator.is_main_process:
                    accelerator.save_state()
                    texts = [each.getMessage() for each in told.buffer]
                    counts.append(sum("inside a window of micro-batches" in each for each in texts))
        finally:
            logging.getLogger("trainer").removeHandler(told)
        accelerator.wait_for_everyone()
        return counts

    assert ranks2(body) == [[1, 1, 2, 2], []]


def test_a_process_that_comes_later_adds_its_state(ranks3, tmp_path):
    def body():
        patch = pytest.MonkeyPatch()
        accelerator, model, optimizer = ready("project")
        folder = Path("project/checkpoints/checkpoint_0")
        update(accelerator, model, optimizer)
        if accelerator.process_index == 1:
            while not (folder / "manifest.json").exists():
                pass
        with patch.context() as patched:
            patched.setattr(main_alone, "_PATIENCE", 0.0)
            if accelerator.process_index < 2:
                accelerator.save_state()
        drawn = torch.rand(1).item()
        accelerator.wait_for_everyone()
        listed = sorted(each for each in verify(folder)["files"] if "random" in each)
        return listed, drawn == drawn_after(accelerator, folder)

    found = ranks3(body)
    assert [exact for _, exact in found] == [True, True, False]
    files = [f"random_states_{rank}.{kind}" for rank in (0, 1) for kind in ("json", "safetensors")]
    assert found[0][0] == sorted(files)


def test_a_save_of_all_beside_one_of_the_main_process_never_waits_in_vain(ranks2, tmp_path):
    def body():
        accelerator, model, optimizer = ready("project")
        third = Path("project/checkpoints/checkpoint_2/manifest.json")
        for number in range(3):
            update(accelerator, model, optimizer)
            if accelerator.is_main_process and number != 1:
                accelerator.save_state()
            while accelerator.process_index and number == 1 and not third.exists():
                pass  # this one comes late
            accelerator.save_state()
        update(accelerator, model, optimizer)
        accelerator.wait_for_everyone()
        return sorted(path.name for path in Path("project/checkpoints").iterdir())

    assert ranks2(body) == [["checkpoint_3", "checkpoint_4"]] * 2


def test_a_process_that_comes_after_two_saves_adds_its_state_to_the_second(ranks2, tmp_path):
    def body():
        patch = pytest.MonkeyPatch()
        accelerator, model, optimizer = ready("project")
        update(accelerator, model, optimizer)
        second = Path("project/checkpoints/checkpoint_1")
        if accelerator.process_index == 1:
            while not (second / "manifest.json").exists():
                pass
        with patch.context() as patched:
            patched.setattr(main_alone, "_PATIENCE", 0.0)
            accelerator.save_state()
            accelerator.save_state()
        accelerator.wait_for_everyone()
        return [
            sum("random" in each for each in verify(folder)["files"])
            for folder in (second.with_name("checkpoint_0"), second)
        ]

    assert ranks2(body) == [[2, 4], [2, 4]]


def test_a_hook_that_waits_for_others_raises_if_the_main_process_saves_alone(ranks2, tmp_path):
    def body():
        accelerator, model, optimizer = ready("project")
        accelerator.register_save_state_pre_hook(lambda *_: accelerator.wait_for_everyone())
        update(accelerator, model, optimizer)
        said = ""
        if accelerator.is_main_process:
            with pytest.raises(CheckpointError) as caught:
                accelerator.save_state()
            said = str(caught.value)
        update(accelerator, model, optimizer)
        return said

    said, _ = ranks2(body)
    assert "wait_for_everyone was called by a hook or a state_dict of save_state" in said
    assert not list((tmp_path / "project/checkpoints").iterdir())


def test_sharded_state_is_not_saved_by_the_main_process_alone(ranks2, tmp_path):
    def body():
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        accelerator, model, optimizer = ready("project", fsdp_plugin=plugin)
        update(accelerator, model, optimizer)
        said = ""
        if accelerator.is_main_process:
            with pytest.raises(DistributedOperationException) as caught:
                accelerator.save_state()
            said = str(caught.value)
        update(accelerator, model, optimizer)  # the other process has been waiting here
        return said, accelerator.save_state().name

    (said, name), (_, other) = ranks2(body)
    assert "rank 1 has already started the next forward pass" in said
    assert "outside of `if accelerator.is_main_process:`" in said
    assert name == other == "checkpoint_0"
