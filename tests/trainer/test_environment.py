"""Who started this process, told from environment variables alone."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from trainer import environment
from trainer.environment import (
    Launch,
    clear_environment,
    detect_launch,
    first_node,
    interpreter_command,
    patch_environment,
    purge_accelerate_environment,
)

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "MV2_", "PMI_", "MPI_")


@pytest.fixture
def variables(monkeypatch):
    """`variables(RANK=1)` sets these and leaves none of another launcher."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)

    def put(**values: object) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return put


SRUN = {
    "SLURM_PROCID": 5,
    "SLURM_STEP_NUM_TASKS": 8,
    "SLURM_LOCALID": 1,
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": 123456,
    "SLURM_JOB_NAME": "train",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": 3,
    "OMPI_COMM_WORLD_SIZE": 4,
    "OMPI_COMM_WORLD_LOCAL_RANK": 1,
    "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
}


@pytest.mark.parametrize("values", [{}, {"WORLD_SIZE": 4}, {"RANK": "", "WORLD_SIZE": 2}])
def test_without_a_rank_the_process_is_alone(variables, values):
    variables(**values)
    assert detect_launch() == Launch(launcher="none")
    assert Launch(launcher="none").world_size == 1


@pytest.mark.parametrize(
    "values",
    [{"RANK": 1, "WORLD_SIZE": 3}, {"PMI_RANK": 1, "PMI_SIZE": 3}],
    ids=["torchrun", "MPI"],
)
def test_rank_and_world_size_alone_mean_one_machine(variables, values):
    variables(**values)
    launch = detect_launch()
    assert (launch.local_rank, launch.local_world_size) == (1, 3)


def test_torchrun_gives_ranks_and_the_meeting_place(variables):
    variables(
        RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, MASTER_ADDR="n0", MASTER_PORT=1234
    )
    assert detect_launch() == Launch(
        launcher="torchrun",
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        master_addr="n0",
        master_port=1234,
    )


def test_a_launcher_inside_a_launched_script_has_a_store_of_its_own(variables, tmp_path):
    variables(RANK=1, WORLD_SIZE=2, MASTER_PORT=7, TORCHELASTIC_RESTART_COUNT=1)
    variables(CADENCE_STORE=tmp_path)
    place = tmp_path / "store-7-1"
    place.mkdir()
    assert detect_launch().store == place
    variables(MASTER_PORT=8)
    assert detect_launch().store is None


def test_torchrun_variables_take_precedence(variables):
    variables(**SRUN, **OPENMPI, RANK=0, WORLD_SIZE=2)
    launch = detect_launch()
    assert (launch.launcher, launch.rank, launch.world_size) == ("torchrun", 0, 2)


def test_srun_gives_ranks_and_the_first_node_with_a_port_of_the_job(variables):
    variables(**SRUN)
    assert detect_launch() == Launch(
        launcher="slurm",
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        master_addr="gpu07",
        master_port=15000 + 3456,
    )


def test_srun_on_one_node_needs_no_node_list(variables):
    variables(SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2, SLURM_LOCALID=1)
    launch = detect_launch()
    assert (launch.local_rank, launch.local_world_size) == (1, 2)
    assert launch.master_addr == "localhost"


def test_exported_addresses_win_over_those_of_slurm(variables):
    variables(**SRUN, SLURM_LAUNCH_NODE_IPADDR="10.0.0.7")
    assert detect_launch().master_addr == "10.0.0.7"
    variables(MASTER_ADDR="head", MASTER_PORT=4242)
    launch = detect_launch()
    assert (launch.master_addr, launch.master_port) == ("head", 4242)


def test_a_slurm_batch_script_is_one_process(variables):
    # The script itself has the job's number of tasks and a PROCID, but no step that it is part of.
    variables(SLURM_JOB_ID=1, SLURM_NTASKS=8, SLURM_PROCID=0, SLURM_LOCALID=0)
    assert detect_launch() == Launch(launcher="none")


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_a_step_of_several_tasks_is_one_whatever_its_job_is_called(variables, name):
    variables(**{**SRUN, "SLURM_JOB_NAME": name})
    assert (detect_launch().rank, detect_launch().world_size) == (5, 8)


@pytest.mark.parametrize(
    ("port", "terminal", "world_size"),
    [("4000", True, 1), ("4000", False, 8), (None, True, 8)],
)
def test_command_typed_into_an_srun_shell_runs_alone(variables, port, terminal, world_size):
    variables(**SRUN)
    if port is not None:
        variables(SLURM_PTY_PORT=port)
    outer, inner = pty.openpty()
    try:
        script = "from trainer import environment; print(environment.detect_launch().world_size)"
        found = subprocess.run(
            [sys.executable, "-c", script],
            stdin=inner if terminal else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            env={
                **os.environ,
                "PYTHONPATH": os.path.dirname(os.path.dirname(environment.__file__)),
            },
        )
    finally:
        os.close(outer)
        os.close(inner)
    assert int(found.stdout) == world_size


def test_srun_on_several_nodes_needs_an_address(variables):
    variables(**SRUN)
    os.environ.pop("SLURM_STEP_NODELIST")
    with pytest.raises(ValueError, match=r"slurm started 8 .* Export .* MASTER_ADDR on every"):
        detect_launch()
    variables(MASTER_ADDR="head")
    assert detect_launch().master_addr == "head"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu003", "gpu003"),
        ("gpu003,gpu004", "gpu003"),
        ("gpu[003-005,9],cpu1", "gpu003"),
        ("gpu[9,11]", "gpu9"),
        ("a-b-[1-2]", "a-b-1"),
        ("n1.example.org,n2.example.org", "n1.example.org"),
    ],
)
def test_first_node_of_a_slurm_list(nodes, first):
    assert first_node(nodes) == first


def test_a_node_list_without_a_host_is_refused():
    with pytest.raises(ValueError, match="',x' names no host"):
        first_node(",x")


@pytest.mark.parametrize(
    ("launcher", "names"),
    [
        ("openmpi", [f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]),
        ("mvapich", [f"MV2_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]),
        ("mpich", ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]),
    ],
)
def test_each_mpi_is_known_by_its_own_names(variables, launcher, names):
    variables(**dict(zip(names, (3, 4, 1, 2), strict=True)), MASTER_ADDR="head", MASTER_PORT=77)
    assert detect_launch() == Launch(
        launcher=launcher,
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        master_addr="head",
        master_port=77,
    )


def test_mpi_on_one_node_meets_there(variables):
    variables(**{**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": 4})
    launch = detect_launch()
    assert (launch.master_addr, launch.master_port) == ("127.0.0.1", environment.DEFAULT_PORT)


def test_mpi_on_several_nodes_needs_an_address(variables):
    variables(**OPENMPI)
    with pytest.raises(ValueError, match=r"openmpi started 4 .* Export .* MASTER_ADDR on every"):
        detect_launch()


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(variables, rank, world_size):
    variables(RANK=rank, WORLD_SIZE=world_size)
    with pytest.raises(ValueError, match=f"torchrun sets rank {rank} of {world_size}"):
        detect_launch()


def test_a_variable_that_is_no_number_is_named(variables):
    variables(RANK="one", WORLD_SIZE=2)
    with pytest.raises(ValueError, match=r"RANK is 'one'; it must be an integer"):
        detect_launch()


@pytest.mark.parametrize(
    ("spellings", "expected"),
    [
        (["1", "true", "True", "YES", "y", "on", "t"], True),
        (["0", "false", "No", "n", "off", "f", ""], False),
    ],
)
def test_flags_are_read_in_every_spelling(variables, spellings, expected):
    assert environment.read_flag("SOME_FLAG", default=expected) is expected
    for text in spellings:
        variables(SOME_FLAG=text)
        assert environment.read_flag("SOME_FLAG", default=not expected) is expected


def test_a_flag_that_means_neither_is_named(variables):
    variables(SOME_FLAG="perhaps")
    with pytest.raises(ValueError, match=r"SOME_FLAG is 'perhaps'; it must be true or false"):
        environment.read_flag("SOME_FLAG")


def test_patch_environment_sets_and_restores_after_an_error(variables):
    variables(OLD_ONE="kept")
    before = dict(os.environ)

    def fail() -> None:
        assert (os.environ["OLD_ONE"], os.environ["NEW_ONE"]) == ("1", "True")
        del os.environ["NEW_ONE"]
        raise KeyError

    with pytest.raises(KeyError), patch_environment(old_one=1, new_one=True):
        fail()
    assert dict(os.environ) == before


def test_clear_environment_restores_after_an_error():
    before = dict(os.environ)
    found = []

    def fail() -> None:
        found.extend(os.environ)
        os.environ["NEW_ONE"] = "gone afterwards"
        raise KeyError

    with pytest.raises(KeyError), clear_environment():
        fail()
    assert found == []
    assert dict(os.environ) == before


def test_variables_that_a_function_sets_are_purged(monkeypatch):
    monkeypatch.setenv("ACCELERATE_BEFORE", "1")

    def body(*_):
        os.environ.update(ACCELERATE_BEFORE="2", ACCELERATE_NEW="1", OTHER_VARIABLE="1")

    class Tests:
        test_inherited = body

    @purge_accelerate_environment
    class Decorated(Tests):
        test_own = body
        helper = body

    class Later(Decorated):
        test_later = body

    monkeypatch.delenv("OTHER_VARIABLE", raising=False)
    for function in (
        purge_accelerate_environment(body),
        Decorated().test_own,
        Decorated().test_inherited,
        Later().test_later,
        Later().test_own,
    ):
        function()
        assert os.environ["ACCELERATE_BEFORE"] == "1"
        assert "ACCELERATE_NEW" not in os.environ
    assert os.environ.pop("OTHER_VARIABLE") == "1"
    Decorated().helper()
    assert os.environ.pop("ACCELERATE_NEW") == os.environ.pop("OTHER_VARIABLE") == "1"


@pytest.mark.parametrize(
    ("command", "options", "runs"),
    [
        ("python", "", ""),
        ("python a.py -W x -m y", "", "a.py -W x -m y"),
        ("python -u -W error -Xdev -X utf8 a.py -u", "-u -W error -Xdev -X utf8", "a.py -u"),
        ("python -uWerror -BWd -m a.b -X c", "-uWerror -BWd", "-m a.b -X c"),
        ("python -OBma --b", "-OB", "-m a --b"),
        ("python --check-hash-based-pycs never -c x a", "--check-hash-based-pycs never", "-c x a"),
        ("python -u - a", "-u", "- a"),
    ],
)
def test_a_command_is_split_into_options_of_python_and_what_it_runs(command, options, runs):
    assert interpreter_command(command.split()) == (options.split(), runs.split())
