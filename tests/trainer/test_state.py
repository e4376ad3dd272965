"""The three singletons of one process."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from trainer.configuration import DistributedType, GradientAccumulationPlugin
from trainer.state import AcceleratorState, GradientState, PartialState


class LoaderStandIn:
    end_of_dataloader = True
    remainder = 3


def test_every_instance_of_a_state_is_the_same_state():
    first = PartialState(cpu=True)
    first.mark = 7
    assert PartialState().mark == 7
    accelerator = AcceleratorState("bf16")
    assert AcceleratorState().mixed_precision == "bf16"
    assert accelerator.device is first.device
    GradientState().sync_gradients = False
    assert GradientState().sync_gradients is False


def test_a_process_alone_has_no_group():
    state = PartialState(cpu=True)
    assert state.device == torch.device("cpu")
    assert state.distributed_type is DistributedType.NO
    assert state.backend is None
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert not state.use_distributed
    assert not dist.is_initialized()
    state.wait_for_everyone()  # needs no group
    state.destroy_process_group()


def test_world_size_one_under_torchrun_starts_no_group(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert PartialState(cpu=True).distributed_type is DistributedType.NO
    assert not dist.is_initialized()


def test_several_processes_without_a_meeting_place_are_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT"):
        PartialState(cpu=True)
    assert not PartialState._shared_state


def test_a_group_that_others_started_says_who_we_are(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    state = PartialState(cpu=True)
    assert (state.num_processes, state.process_index) == (1, 0)


def test_a_group_wins_over_variables_that_say_otherwise(tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    state = PartialState(cpu=True)
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)


def test_the_variable_forces_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert PartialState().device == torch.device("mps")
    PartialState._reset_state()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "yes")
    assert PartialState().device == torch.device("cpu")


def test_a_device_named_by_variable_is_taken_unless_the_cpu_is_asked_for(monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "mps")
    assert PartialState().device == torch.device("mps")
    PartialState._reset_state()
    assert PartialState(cpu=True).device == torch.device("cpu")


def test_more_processes_than_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"Local rank 2 .* 2 cuda device\(s\).* pass cpu=True"):
        PartialState()


def test_the_cpu_cannot_be_asked_for_after_another_device_was_taken(monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "mps")
    PartialState()
    with pytest.raises(ValueError, match=r"already uses mps. Restart it and pass cpu=True"):
        PartialState(cpu=True)
    with pytest.raises(ValueError, match="already uses mps"):
        AcceleratorState(cpu=True)


def test_debug_mode_is_read_from_its_variable(monkeypatch):
    assert PartialState(cpu=True).debug is False
    PartialState._reset_state()
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    assert PartialState(cpu=True).debug is True


def test_a_state_that_was_reset_says_so_when_it_is_asked():
    state = PartialState(cpu=True)
    PartialState._reset_state()
    assert not state.initialized
    assert repr(state) == "PartialState(reset)"
    with pytest.raises(
        AttributeError,
        match=r"`PartialState` object has no attribute `num_processes`. This happens if "
        r"`PartialState._reset_state\(\)` was called",
    ):
        state.num_processes
    assert PartialState(cpu=True).num_processes == 1
    assert state.num_processes == 1  # one state: the old instance sees the new values


def test_accelerator_state_that_was_reset_names_itself():
    state = AcceleratorState(cpu=True)
    AcceleratorState._reset_state()
    for name in ("mixed_precision", "device"):
        with pytest.raises(AttributeError, match=rf"`AcceleratorState` object .* `{name}`"):
            getattr(state, name)
    assert PartialState().initialized
    AcceleratorState._reset_state(reset_partial_state=True)
    assert repr(state) == "AcceleratorState(reset)"
    assert not PartialState._shared_state


def test_an_attribute_that_never_was_is_an_ordinary_error():
    with pytest.raises(AttributeError, match="'PartialState' object has no attribute 'rank'"):
        PartialState(cpu=True).rank


def test_precision_is_no_unless_the_variable_or_the_argument_says_otherwise(monkeypatch):
    assert AcceleratorState(cpu=True).mixed_precision == "no"
    AcceleratorState._reset_state()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert AcceleratorState(cpu=True).mixed_precision == "bf16"
    AcceleratorState._reset_state()
    assert AcceleratorState("fp16", cpu=True).mixed_precision == "fp16"


def test_an_unknown_precision_is_refused_where_it_came_from(monkeypatch):
    with pytest.raises(
        ValueError, match=r"mixed_precision is 'bf61'; it must be one of .* Did you mean 'bf16'\?"
    ):
        AcceleratorState("bf61", cpu=True)
    assert not PartialState._shared_state
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "half")
    with pytest.raises(ValueError, match="ACCELERATE_MIXED_PRECISION is 'half'"):
        AcceleratorState(cpu=True)


def test_precision_cannot_change():
    AcceleratorState("no", cpu=True)
    with pytest.raises(
        ValueError, match=r"with mixed_precision='no' and cannot be changed.*'bf16' the first time"
    ):
        AcceleratorState("bf16")
    assert AcceleratorState("no").mixed_precision == "no"


def test_states_describe_themselves():
    text = repr(AcceleratorState("bf16", cpu=True))
    assert text == (
        "Distributed environment: NO\nNum processes: 1\nProcess index: 0\n"
        "Local process index: 0\nDevice: cpu\nMixed precision type: bf16\n"
    )
    assert "Sync gradients: True" in repr(GradientState())


def test_print_is_heard_once_a_machine(capsys):
    state = PartialState(cpu=True)
    state.print("one", "two", sep="-")
    state.__dict__["local_process_index"] = 1
    state.print("three")
    assert capsys.readouterr().out == "one-two\n"


def test_gradient_state_starts_with_windows_of_one():
    state = GradientState()
    assert (state.num_steps, state.sync_gradients, state.sync_with_dataloader) == (1, True, True)
    assert (state.in_dataloader, state.end_of_dataloader, state.remainder) == (False, False, -1)


def test_a_later_window_replaces_the_first():
    GradientState(GradientAccumulationPlugin(num_steps=4))
    assert GradientState().num_steps == 4
    GradientState(GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False))
    assert (GradientState().num_steps, GradientState().sync_with_dataloader) == (2, False)


def test_the_innermost_loader_is_the_active_one():
    state = GradientState()
    outer, inner = LoaderStandIn(), LoaderStandIn()
    inner.end_of_dataloader, inner.remainder = False, 5
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    assert (state.active_dataloader, state.end_of_dataloader, state.remainder) == (inner, False, 5)
    state._remove_dataloader(inner)
    assert (state.active_dataloader, state.end_of_dataloader, state.remainder) == (outer, True, 3)
    state._remove_dataloader(outer)
    assert not state.in_dataloader


def test_a_loader_that_is_gone_is_not_active():
    state = GradientState()
    kept, lost = LoaderStandIn(), LoaderStandIn()
    state._add_dataloader(kept)
    state._add_dataloader(lost)
    del lost
    gc.collect()
    assert state.active_dataloader is kept
