"""The three singletons of one process."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import os
import pickle
import socket
import sys
import threading
import warnings

import pytest
import torch
import torch.distributed as dist

from trainer import Accelerator, Trainer
from trainer.configuration import GradientAccumulationPlugin, TorchDynamoPlugin
from trainer.enums import DistributedType
from trainer.environment import Launch
from trainer.state import AcceleratorState, GradientState, PartialState, network
from trainer.state import group as joining

PLUGINS = ("torch_tp_plugin", "dynamo_plugin", "fsdp_plugin", "megatron_lm_plugin")


class LoaderStandIn:
    end_of_dataloader = True
    remainder = 3

    def __iter__(self):
        GradientState()._add_dataloader(self)
        try:
            while True:
                yield 1
        finally:
            GradientState()._remove_dataloader(self)


def make(mixed_precision=None, cpu=True, **kwargs) -> AcceleratorState:
    """What an `Accelerator` does."""
    return AcceleratorState(mixed_precision, cpu, _from_accelerator=True, **kwargs)


def test_every_instance_of_a_state_is_the_same_state():
    first = PartialState(cpu=True)
    first.mark = 7
    assert PartialState().mark == 7
    accelerator = make("bf16")
    assert AcceleratorState().mixed_precision == "bf16"
    assert accelerator.device is first.device
    GradientState().sync_gradients = False
    assert GradientState().sync_gradients is False


@pytest.mark.parametrize("launched", [{}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}])
def test_a_process_alone_has_no_group(monkeypatch, launched):
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
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


def test_several_processes_without_a_master_address_are_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT"):
        PartialState(cpu=True)
    assert not PartialState._shared_state


def test_a_group_wins_over_variables_that_say_otherwise(tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    state = PartialState(cpu=True)
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)


def test_accelerate_use_cpu_forces_the_cpu(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)  # set where there is a GPU
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert PartialState().device == torch.device("mps")
    PartialState._reset_state()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "yes")
    assert PartialState().device == torch.device("cpu")


def test_a_device_named_by_variable_is_taken_unless_the_cpu_is_asked_for(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)  # set where there is a GPU
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "mps")
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    assert PartialState().device == torch.device("mps")
    PartialState._reset_state()
    assert PartialState(cpu=True).device == torch.device("cpu")


def test_more_processes_than_devices_are_refused(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)  # set where there is a GPU
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"Local rank 2 .* 2 cuda device\(s\).* pass cpu=True"):
        PartialState()


def test_the_cpu_cannot_be_asked_for_after_another_device_was_taken(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)  # set where there is a GPU
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "mps")
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    PartialState()
    with pytest.raises(ValueError, match=r"already uses mps. Restart it and pass cpu=True"):
        PartialState(cpu=True)
    with pytest.raises(ValueError, match="already uses mps"):
        make(cpu=True)


def test_debug_mode_is_read_from_its_variable(monkeypatch):
    assert PartialState(cpu=True).debug is False
    PartialState._reset_state()
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    assert PartialState(cpu=True).debug is True


def test_attributes_of_a_state_that_was_reset_raise():
    partial, accelerator, gradient = states()
    AcceleratorState._reset_state()
    assert not accelerator.initialized
    assert partial.initialized
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for state, names in (
        (partial, ("num_processes", "is_main_process", "device", "debug")),
        (accelerator, ("mixed_precision", "device")),
        (gradient, ("num_steps", "sync_gradients")),
    ):
        kind = type(state).__name__
        assert repr(state) == f"{kind}(reset)"
        for name in names:
            with pytest.raises(AttributeError, match=rf"`{kind}`.* `{name}`.*_reset_state\(\)"):
                getattr(state, name)
    assert PartialState(cpu=True).num_processes == 1
    assert partial.num_processes == 1  # one state: the old instance sees the new values


def test_precision_is_no_unless_the_variable_or_the_argument_says_otherwise(monkeypatch):
    assert make().mixed_precision == "no"
    AcceleratorState._reset_state()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert make().mixed_precision == "bf16"
    AcceleratorState._reset_state()
    assert make("fp16").mixed_precision == "fp16"


def test_an_unknown_precision_is_refused_where_it_came_from(monkeypatch):
    with pytest.raises(ValueError, match=r"mixed_precision is 'bf61'.* Did you mean 'bf16'\?"):
        make("bf61")
    assert not PartialState._shared_state
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "half")
    with pytest.raises(ValueError, match="ACCELERATE_MIXED_PRECISION is 'half'"):
        make()


def test_states_describe_themselves():
    text = repr(make("bf16"))
    assert text == (
        "Distributed environment: DistributedType.NO\nNum processes: 1\nProcess index: 0\n"
        "Local process index: 0\nDevice: cpu\nMixed precision type: bf16\n"
    )
    assert "Sync gradients: True" in repr(GradientState())


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_print_escapes_what_the_output_cannot_show(monkeypatch, encoding):
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", output)
    PartialState(cpu=True).print("from", "runs/木", 3, sep="→", end="木")
    output.flush()
    assert output.buffer.getvalue() == rb"from\u2192runs/\u6728\u21923\u6728"


# -- what cannot be changed ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["device", "num_processes", "is_main_process", "initialized"])
def test_attributes_of_partial_state_are_read_only(name):
    state = PartialState(cpu=True)
    before = getattr(state, name)
    with pytest.raises(AttributeError, match=f"`PartialState.{name}` is read-only"):
        setattr(state, name, 7)
    assert getattr(PartialState(), name) == before


@pytest.mark.parametrize("name", ["mixed_precision", "device", "dynamo_plugin"])
def test_attributes_of_accelerator_state_are_read_only(name):
    state = make("bf16")
    with pytest.raises(AttributeError, match=f"`AcceleratorState.{name}` .* cannot be set"):
        setattr(state, name, "fp16")
    assert AcceleratorState().mixed_precision == "bf16"


@pytest.mark.parametrize("name", ["num_steps", "plugin_kwargs", "in_dataloader", "remainder"])
def test_only_sync_gradients_of_gradient_state_can_be_assigned(name):
    state = GradientState()
    with pytest.raises(AttributeError, match=f"`GradientState.{name}` .*accumulation_steps"):
        setattr(state, name, 2)
    state.sync_gradients = False
    assert not GradientState().sync_gradients


# -- before and after ----------------------------------------------------------------------------


def test_accelerator_state_needs_an_accelerator_first():
    for arguments in ({}, {"mixed_precision": "bf16", "cpu": True}):
        with pytest.raises(ValueError, match=r"Create one first: accelerator = Accelerator\(\)"):
            AcceleratorState(**arguments)
    assert not AcceleratorState._shared_state
    make("bf16")
    assert AcceleratorState().mixed_precision == "bf16"


def test_sagemaker_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_SAGEMAKER", "true")
    with pytest.raises(NotImplementedError, match=r"SageMaker's .*torch_distributed"):
        PartialState()


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_are_kept_and_cannot_change(name):
    others = {each: getattr(make(**{name: "first"}), each) for each in PLUGINS if each != name}
    assert others.pop("dynamo_plugin", TorchDynamoPlugin()) == TorchDynamoPlugin(backend="no")
    assert set(others.values()) == {None}
    assert getattr(AcceleratorState(), name) == "first"
    make(**{name: "first"})
    with pytest.raises(
        ValueError, match=f"already been initialised with {name}='first' .*'second'"
    ):
        make(**{name: "second"})


def test_the_accelerator_state_knows_what_the_process_knows_and_no_more():
    state = make("bf16")
    partial = PartialState()
    for name in (*vars(partial), "is_main_process", "use_distributed", "mixed_precision"):
        assert getattr(state, name) == getattr(partial, name), name
    partial.mark = 7
    assert state.mark == 7
    assert state.initialized
    AcceleratorState._reset_state()
    assert not state.initialized
    assert partial.mixed_precision == "no"


# -- copies and pickles --------------------------------------------------------------------------


def states() -> list:
    return [PartialState(cpu=True), make("bf16"), GradientState()]


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))]
)
def test_copies_are_the_live_state(duplicate):
    loader = LoaderStandIn()
    for state in states():
        if isinstance(state, GradientState):
            state._add_dataloader(loader)
        assert vars(duplicate(state)) is vars(state)
    assert duplicate(GradientState()).active_dataloader is loader


def test_a_pickle_that_is_opened_elsewhere_describes_and_starts_nothing():
    GradientState(GradientAccumulationPlugin(num_steps=3))._add_dataloader(LoaderStandIn())
    texts = [pickle.dumps(state) for state in states()]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    partial, accelerator, gradient = (pickle.loads(text) for text in texts)
    assert (partial.num_processes, partial.is_main_process) == (1, True)
    assert (accelerator.mixed_precision, accelerator.device.type) == ("bf16", "cpu")
    assert (gradient.num_steps, gradient.active_dataloader) == (3, None)
    for kind in (PartialState, AcceleratorState, GradientState):
        assert not kind._shared_state


# -- devices -------------------------------------------------------------------------------------


def launch(rank: int = 0, world_size: int = 1) -> Launch:
    return Launch(
        launcher="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
    )


@pytest.mark.parametrize(
    ("named", "world_size", "device"),
    [("cuda", 1, "cuda:3"), ("cuda", 2, "cuda:1"), ("cuda:5", 2, "cuda:5"), ("cpu", 2, "cpu")],
)
def test_a_named_accelerator_is_shared_out_by_local_rank(monkeypatch, named, world_size, device):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", named)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    place = launch(world_size - 1, world_size)
    assert joining.pick_device(place, cpu=False) == torch.device(device)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "mps")
    with pytest.raises(ValueError, match="is 'mps', which has no collectives for 2 processes"):
        joining.pick_device(launch(0, 2), cpu=False)


def test_kinds_of_processes_follow_the_device():
    kinds = {
        name: joining.distributed_type(torch.device(name), 2).value
        for name in ("cpu", "cuda", "xpu")
    }
    assert kinds == {"cpu": "MULTI_CPU", "cuda": "MULTI_GPU", "xpu": "MULTI_XPU"}
    assert joining.distributed_type(torch.device("cuda"), 1) is DistributedType.NO


def test_the_default_device_has_no_index(monkeypatch):
    state = PartialState(cpu=True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert state.default_device == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda:3"))
    assert state.default_device == torch.device("cuda")
    assert state.device == torch.device("cpu")


def test_set_device_makes_the_device_current(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    state = PartialState(cpu=True)
    state.set_device()
    assert chosen == []
    state.__dict__["device"] = torch.device("cuda:3")
    thread = threading.Thread(target=state.set_device)
    thread.start()
    thread.join()
    assert chosen == [3]


def test_an_unknown_backend_is_refused_before_the_rendezvous(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    for backend in ("ncll", "cpu:ncll,cuda:gloo", "cpu:gloo,cuda:ncll"):
        with pytest.raises(ValueError, match=r"backend 'ncll' is not available .*Leave it out"):
            PartialState(cpu=True, backend=backend)


def test_processes_of_one_machine_share_its_cores(monkeypatch, caplog):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    torch.set_num_threads(6)
    joining.limit_threads(launch(0, 4))
    assert torch.get_num_threads() == 6  # the user has said it
    monkeypatch.delenv("OMP_NUM_THREADS")
    joining.limit_threads(launch(0, 4))
    assert torch.get_num_threads() == 2
    assert "each of the 4 processes of this machine uses 2 thread(s)" in caplog.text
    joining.limit_threads(launch(0, 1))
    assert torch.get_num_threads() == 2  # never more than there were
    joining.limit_threads(launch(0, 20))
    assert torch.get_num_threads() == 1


def test_a_fork_of_a_launcher_keeps_its_group(tmp_path, monkeypatch):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    state = PartialState(cpu=True)
    assert not state.fork_launched
    monkeypatch.setenv("FORK_LAUNCHED", "1")
    assert state.fork_launched
    state.destroy_process_group()
    assert dist.is_initialized()
    state.destroy_process_group(dist.group.WORLD)
    assert not dist.is_initialized()


# -- decorators ----------------------------------------------------------------------------------

PLAIN = ["on_main_process", "on_local_main_process", "on_last_process"]
INDEXED = {"on_process": "process_index", "on_local_process": "local_process_index"}


def double(value: int = 1) -> int:
    """Twice."""
    return 2 * value


@pytest.mark.parametrize("name", PLAIN)
def test_decorated_functions_run_on_their_process(name):
    state = PartialState(cpu=True)
    wrapped = getattr(state, name)(double)
    assert (wrapped.__name__, wrapped.__doc__, wrapped(value=3)) == ("double", "Twice.", 6)
    state.__dict__.update(process_index=1, local_process_index=1, num_processes=3)
    assert wrapped(3) is None  # asked at each call


@pytest.mark.parametrize("name", INDEXED)
def test_indexed_decorators_take_their_function_at_once_or_later(name):
    state = PartialState(cpu=True)
    method, index = getattr(state, name), INDEXED[name]
    always = method(double, 5)  # one process stands for all of them
    assert always(3) == 6
    state.__dict__.update(
        process_index=1, local_process_index=1, num_processes=3, _local_world_size=3
    )
    assert [method(double, rank)(3) for rank in range(3)] == [None, 6, None]
    assert method(**{index: 1})(double)(3) == 6
    assert method(**{index: 1})(double).__name__ == "double"
    assert method(double, **{index: 2})(3) is None


@pytest.mark.parametrize(("name", "below"), [("on_process", 4), ("on_local_process", 2)])
def test_processes_that_do_not_exist_are_refused(name, below):
    state = PartialState(cpu=True)
    state.__dict__.update(num_processes=4, _local_world_size=2)
    getattr(state, name)(double, below - 1)
    for index, message in (
        (None, "is missing"),
        (below, f"is {below}.* below {below}"),
        (-1, "is -1"),
    ):
        for function in (double, None):
            with pytest.raises(ValueError, match=f"{INDEXED[name]} {message}"):
                getattr(state, name)(function, index)


@pytest.mark.parametrize("name", PLAIN)
def test_a_decorator_without_a_function_is_refused(name):
    with pytest.raises(
        ValueError, match=f"write `@state.{name}` above a function, without parenth"
    ):
        getattr(PartialState(cpu=True), name)(None)


@pytest.mark.parametrize("name", [*PLAIN, *INDEXED])
def test_a_decorator_needs_a_state(name):
    state = PartialState(cpu=True)
    PartialState._reset_state()
    arguments = (double, 0) if name in INDEXED else (double,)
    with pytest.raises(ValueError, match=f"`{name}` needs to know which process this is"):
        getattr(state, name)(*arguments)


# -- the window ----------------------------------------------------------------------------------


def test_the_window_says_what_its_latest_plugin_says():
    state = GradientState()
    assert (state.num_steps, state.sync_gradients, state.sync_with_dataloader) == (1, True, True)
    assert (state.adjust_scheduler, state.sync_each_batch) == (True, False)
    assert (state.in_dataloader, state.end_of_dataloader, state.remainder) == (False, False, -1)
    assert state.plugin_kwargs == {"num_steps": 1}
    options = {"num_steps": 2, "adjust_scheduler": False, "sync_each_batch": True}
    GradientState(GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False))
    assert (state.num_steps, state.sync_with_dataloader) == (4, False)
    GradientState(GradientAccumulationPlugin(**options))
    assert (state.adjust_scheduler, state.sync_each_batch) == (False, True)
    assert state.plugin_kwargs == options
    with pytest.raises(TypeError, match="gradient_accumulation_plugin is 4; it must be"):
        GradientState(4)
    assert state.num_steps == 2


def test_the_innermost_loader_that_is_read_is_the_active_one():
    state = GradientState()
    outer, inner = LoaderStandIn(), LoaderStandIn()
    inner.end_of_dataloader, inner.remainder = False, 5
    assert state.dataloader_references == [None]
    for _ in outer:
        for _ in inner:
            assert state.dataloader_references == [None, outer, inner]
            assert state.active_dataloader is inner
            assert (state.end_of_dataloader, state.remainder) == (False, 5)
            break
        assert state.dataloader_references == [None, outer]
        assert (state.end_of_dataloader, state.remainder) == (True, 3)
        break
    assert not state.in_dataloader


def test_an_iteration_that_ends_late_does_not_end_the_one_after_it():
    state, loader = GradientState(), LoaderStandIn()
    stale = iter(loader)
    next(stale)  # given up, but somebody (a traceback, a notebook) still holds it
    for _ in loader:
        stale.close()
        assert state.active_dataloader is loader
        break
    assert not state.in_dataloader


def test_a_loader_that_is_gone_is_not_active():
    state, kept = GradientState(), LoaderStandIn()
    reading = iter(LoaderStandIn())
    next(reading)
    cycle = [reading]
    cycle.append(cycle)  # only the collector can close it
    assert state.in_dataloader
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del reading, cycle
        gc.collect()
    assert not state.in_dataloader
    lost = LoaderStandIn()
    state._add_dataloader(kept)
    state._add_dataloader(lost)
    del lost
    gc.collect()
    assert state.active_dataloader is kept


@pytest.mark.parametrize(
    ("system", "release", "old"),
    [
        ("Linux", "5.4.0-77-generic", True),
        ("Linux", "4.15", True),
        ("Darwin", "4.15", False),
        ("Linux", "5.5.0", False),
        ("Linux", "5.10.16-microsoft", False),
        ("Linux", "unknown", False),
    ],
)
def test_an_old_kernel_is_warned_of(monkeypatch, caplog, system, release, old):
    monkeypatch.setattr(joining.platform, "system", lambda: system)
    monkeypatch.setattr(joining.platform, "release", lambda: release)
    Accelerator(cpu=True)
    assert (f"kernel of this machine is {release}, below 5.5" in caplog.text) == old
    caplog.clear()
    PartialState().__dict__["process_index"] = 1
    Accelerator(cpu=True)
    assert "kernel" not in caplog.text


def test_the_backend_of_cuda_is_not_asked_for_on_a_cpu(monkeypatch):
    # Scripts for the documented API say "nccl", its default, wherever they run.
    asked = []
    monkeypatch.setattr(joining.dist, "init_process_group", lambda *a, **k: asked.append(a[0]))
    launch = Launch(launcher="torchrun", world_size=2, master_addr="localhost", master_port=29500)
    for backend in ("nccl", None, "gloo"):
        joining.join_group(launch, torch.device("cpu"), {"backend": backend})
    assert asked == ["gloo"] * 3


def test_use_ipex_is_false():
    assert make("no").use_ipex is False


@pytest.mark.parametrize(
    ("own", "master", "source", "there", "chosen", "warned"),
    [
        ("127.0.1.1", "10.0.0.1", "10.0.0.2", ["10.0.0.2", "172.17.0.1"], "if-10.0.0.2", False),
        (None, "10.0.0.1", "10.0.0.2", ["10.0.0.2", "172.17.0.1"], "if-10.0.0.2", False),
        ("127.0.1.1", "node0", "127.0.1.1", ["10.0.0.1"], "if-10.0.0.1", False),
        ("127.0.1.1", "node0", "127.0.1.1", ["10.0.0.1", "172.17.0.1"], None, True),
        ("127.0.1.1", "10.0.0.1", None, [], None, True),
        ("10.0.0.2", "10.0.0.1", "10.0.0.2", ["10.0.0.2"], None, False),
        ("127.0.1.1", "localhost", "127.0.0.1", ["10.0.0.2"], None, False),
    ],
)
def test_gloo_takes_the_interface_that_other_machines_reach(
    monkeypatch, caplog, own, master, source, there, chosen, warned
):
    def address(host, port):
        if own is None:
            raise socket.gaierror
        return [(None, None, None, None, (own, port))]

    monkeypatch.setenv(network._VARIABLE, "")
    monkeypatch.setattr(network.socket, "getaddrinfo", address)
    monkeypatch.setattr(network, "source", lambda _: source)
    monkeypatch.setattr(network, "_interfaces", lambda: {each: f"if-{each}" for each in there})
    for size in (2, 1):  # on one machine, on two
        launch = Launch(
            launcher="", world_size=2, local_world_size=size, master_addr=master, master_port=1
        )
        assert not caplog.text
        network.choose_interface(launch)
        assert os.environ[network._VARIABLE] == ((chosen or "") if size == 1 else "")
    assert ("Set GLOO_SOCKET_IFNAME to the interface that reaches" in caplog.text) == warned


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_interfaces_are_found_by_their_addresses():
    there = network._interfaces()
    assert set(there.values()) <= {name for _, name in socket.if_nameindex()}
    assert not any(network._is_loopback(address) for address in there)
    for address in there:
        assert network.source(address) == network.reachable_from(address) == address
    assert network.source("127.0.0.1") == "127.0.0.1"
    assert network.reachable_from("127.0.0.1") is None


@pytest.mark.parametrize("backend", [None, "cpu:gloo", "fake"])
def test_a_group_of_any_backend_chooses_its_interface_and_ends_its_threads(monkeypatch, backend):
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    asked = []
    monkeypatch.setattr(joining, "choose_interface", asked.append)
    monkeypatch.setattr(joining.atexit, "register", asked.append)
    launch = Launch(launcher="", master_addr="localhost", master_port=1)
    kwargs = {"store": dist.HashStore(), "backend": backend}
    joining.join_group(launch, torch.device("cpu"), kwargs)
    dist.destroy_process_group()
    assert asked == [launch, joining._let_threads_finish]


@pytest.mark.parametrize(
    ("name", "value"), [("PJRT_DEVICE", "TPU"), ("TPU_NAME", "v4-8"), ("XLA_USE_BF16", "1")]
)
def test_xla_devices_are_refused_rather_than_ignored(monkeypatch, name, value):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setenv("XLA_DOWNCAST_BF16", "0")
    monkeypatch.setenv("PJRT_DEVICE", joining.default_device().type.upper())  # which is used anyway
    monkeypatch.setenv(name, value)
    for make in (Accelerator, Trainer, PartialState):
        with pytest.raises(NotImplementedError, match=f"^{name}={value}: torch_xla's devices"):
            make()
    assert PartialState(cpu=True).distributed_type != DistributedType.XLA
