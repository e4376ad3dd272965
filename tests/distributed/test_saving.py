"""The state of several processes in one folder, and in one for each machine."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer import Accelerator
from trainer.checkpoint.accelerator_state import Prepared, load_state, save_state
from trainer.checkpoint.accelerator_state import load_state as load_project
from trainer.checkpoint.accelerator_state import save_state as save_project
from trainer.checkpoint.storage import verify
from trainer.configuration import ProjectConfiguration
from trainer.errors import CheckpointError
from trainer.state import PartialState


class Node:
    """A process as it would be on machines of one process each."""

    def __init__(self, state):
        self.is_main_process, self.num_processes = state.is_main_process, state.num_processes
        self.process_index, self.local_process_index = state.process_index, 0
        self.is_local_main_process = True


def make(seed: int) -> Prepared:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return Prepared(models=[model], optimizers=[torch.optim.AdamW(model.parameters())], step=seed)


def train(prepared: Prepared) -> float:
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
        save_state("out", Prepared(step=3), state)
        return torch.rand(1).item()

    def load():
        step = load_state("out", Prepared(), PartialState())
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
        missing = outcome(load_state, "nothing", Prepared(), state)
        saved = outcome(save_state, f"out-{state.process_index}", Prepared(step=7), state)
        loaded = outcome(load_state, f"out-{state.process_index}", Prepared(), state)
        return missing, saved, loaded

    seen = ranks2(body)
    assert seen[0] == seen[1]
    assert seen[0][0].startswith("ValueError: Tried to find nothing but folder does not exist")
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
