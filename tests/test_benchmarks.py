"""The benchmarks measure what they say: each runs in small, and its table has its rows."""

from __future__ import annotations

import errno
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from benchmarks import (
    checkpoint,
    contestants,
    data,
    ddp,
    fsdp,
    gpu,
    gpu_sections,
    imports,
    logs,
    memory,
    overhead,
    page,
    peers,
    pipeline,
    report,
    scale,
    transformer,
)
from benchmarks.__main__ import BENCHMARKS, main, parser
from benchmarks.chart import draw
from benchmarks.gpt import TINY, Gpt, Size, flops_per_token
from benchmarks.report import Column, Result, Row, Unavailable
from benchmarks.task import DATASETS, OPTIMIZERS, Task, nearly_equal, weights
from benchmarks.timing import (
    LEAST_STEPS,
    Clock,
    Contender,
    Lap,
    chosen,
    quartiles,
    take_turns,
    timed,
    unseen,
)
from tests.helpers import isolation
from trackers import read_metrics

ROOT = Path(__file__).resolve().parents[1]
# Of torch, while it compiles; the second one it hides by other means than filters.
compiles = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)


def options(name, *arguments):
    """The options of a benchmark, as the command line gives them."""
    return parser().parse_args([name, *map(str, arguments)])


def assert_measured(result, names):
    """All of these rows, and nothing else, have all figures."""
    assert [row.name for row in result.rows] == names
    for row in result.rows:
        assert row.void is None, f"{row.name}: {row.void}"
        assert {column.key for column in result.columns} <= row.values.keys()
        for figures in row.values.values():
            assert not isinstance(figures, list) or figures[1] <= figures[0] <= figures[2]
        assert row.name in result.table()
    json.dumps([row.samples for row in result.rows])


# -- the clock and the turns -----------------------------------------------------------------------


def test_the_clock_counts_from_the_first_step_that_counts_to_the_last(monkeypatch):
    seconds = itertools.count(step=3.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds) * 2)
    monkeypatch.setattr(time, "process_time", lambda: next(seconds))
    waits = []
    clock = Clock(11, skip=2, wait=lambda: waits.append(clock.count))
    for _ in range(11):
        clock.tick()
    # between them lie the steps 3 to 10, eight of them; each clock is read twice, 6 s apart
    assert clock.lap("end") == Lap(wall=12 / 8, cpu=6 / 8, outcome="end")
    assert waits == [3, 11]


@pytest.mark.parametrize("made", [9, 11])
def test_a_loop_of_another_length_is_no_result(made):
    clock = Clock(10)
    for _ in range(made):
        clock.tick()
    with pytest.raises(RuntimeError, match=rf"{made} steps were made, but 10 were expected"):
        clock.lap()


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="2 steps, 1 of them not counted, are too few"):
        Clock(2, skip=1)
    for clock in (Clock(LEAST_STEPS), Clock(LEAST_STEPS, skip=1), memory.Meter(LEAST_STEPS)):
        assert clock.steps - clock.first >= 1


def test_timed_divides_by_the_parts(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", iter([1.0, 9.0]).__next__)
    monkeypatch.setattr(time, "process_time", iter([1.0, 5.0]).__next__)
    assert timed(lambda: "done", 4) == Lap(wall=2.0, cpu=1.0, outcome="done")


def playing(name, walls, seen, outcome="same"):
    """A contender that takes what it is told, first in the round that does not count."""
    remaining = iter(walls)

    def run():
        seen.append(name)
        wall = next(remaining)
        return Lap(wall=wall, cpu=wall / 2, outcome=outcome)

    return Contender(name=name, run=run)


def test_turns_are_compared_with_the_reference_of_their_round():
    seen = []
    one = playing("one", [9.0, 1.0, 2.0, 4.0], seen)
    other = playing("other", [9.0, 3.0, 4.0, 4.0], seen)
    first, second = take_turns([one, other], 3, unit=1.0, group="both")
    assert seen == ["one", "other", "other", "one"] * 2  # each begins as often
    assert first.values["wall"] == [2.0, 1.5, 3.0]
    assert first.values["wall_ratio"] == [1.0, 1.0, 1.0]
    assert second.samples["wall_ratio"] == [3.0, 2.0, 1.0]
    assert second.values["cpu"] == [2.0, 1.75, 2.0]
    assert second.group == "both"


def test_who_comes_to_another_outcome_has_no_figures():
    seen = []
    reference = playing("reference", [1.0] * 3, seen)
    wrong = playing("wrong", [1.0] * 3, seen, outcome="another")
    assert [row.void for row in take_turns([reference, wrong], 2)] == [
        None,
        "void: its outcome differs from the reference",
    ]
    rows = take_turns(
        [playing("a", [1.0] * 2, seen, 1.0), playing("b", [1.0] * 2, seen, 1.01)],
        1,
        agree=lambda one, two: abs(one - two) < 0.1,
    )
    assert [row.void for row in rows] == [None, None]


def test_who_is_not_installed_is_not_run():
    seen = []
    absent = Contender(name="absent", run=lambda: 1 // 0, needs=("json", "no_such_package"))
    rows = take_turns([playing("reference", [1.0] * 3, seen), absent], 2)
    assert rows[1].void == "not installed: no_such_package"
    assert not rows[1].values


def test_without_the_reference_nobody_is_measured():
    absent = Contender(name="absent", run=list, needs=("no_such_package",))
    rows = take_turns([absent, playing("other", [], [])], 2)
    assert [row.void for row in rows] == ["not installed: no_such_package"] * 2


def test_an_error_of_a_contender_is_raised():
    with pytest.raises(ZeroDivisionError):
        take_turns([Contender(name="fails", run=lambda: 1 // 0)], 1)


def test_rows_are_chosen_by_a_part_of_their_name_beside_the_reference():
    contenders = [Contender(name=name, run=list) for name in ("By hand", "Cadence a", "Peer b")]
    assert [c.name for c in chosen(contenders, ["CADENCE"])] == ["By hand", "Cadence a"]
    assert chosen(contenders, []) == contenders


def test_quartiles():
    assert quartiles([5.0]) == [5.0, 5.0, 5.0]
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == [3.0, 2.0, 4.0]


def test_what_is_unseen_is_drawn_for_a_terminal(capsys):
    import sys

    with unseen():
        print("out")
        print("err", file=sys.stderr)
        assert sys.stderr.isatty()
    assert capsys.readouterr() == ("", "")


# -- tables and files ------------------------------------------------------------------------------


def small_result(**settings):
    return Result(
        benchmark="small",
        title="Two rows",
        columns=[Column("a", "a µs"), Column("b", "b", 3)],
        rows=[
            Row(name="first", group="g", values={"a": [1234.56, 1000.0, 2000.0], "b": 1.0}),
            Row(name="second", group="g", void="not installed: x"),
        ],
        settings=settings,
        notes=["A note."],
    )


def test_a_table_is_aligned_markdown():
    assert small_result().table() == (
        "|        |                      a µs |     b |\n"
        "|--------|--------------------------:|------:|\n"
        "| *g*    |                           |       |\n"
        "| first  | 1,234.6 (1,000.0–2,000.0) | 1.000 |\n"  # noqa: RUF001 - a range
        "| second |          not installed: x |       |"
    )


def test_a_result_comes_back_from_its_file(tmp_path):
    result = small_result(steps=3)
    assert Result.load(result.save(tmp_path / "new")) == result
    assert torch.__version__.startswith(result.versions["torch"])  # without the build, as "+cpu"
    assert "steps 3" in result.about()
    assert json.loads((tmp_path / "new" / "small.json").read_text())["made"] == result.made


def test_a_plain_checkout_has_a_version_too(monkeypatch):
    def version(name):
        if name == "cadence-trainer":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(report, "git_commit", lambda folder: "0123456789abcdef")
    monkeypatch.setattr(metadata, "version", version)
    assert report.versions()["cadence-trainer"] == "checkout at 012345678"


def test_the_page_has_the_figures_of_the_files(tmp_path):
    small_result().save(tmp_path)
    text = (
        "Before.\n<!-- results of small -->\nold\n<!-- end -->\n"
        "<!-- results of other -->\n<!-- end -->\nAfter.\n"
    )
    made = page.written(text, tmp_path)
    assert small_result().table() in made
    assert "old" not in made
    assert "*Not measured yet: `python -m benchmarks other`.*" in made
    assert page.written(made, tmp_path) == made
    assert made.startswith("Before.\n")
    assert made.endswith("After.\n")


def test_a_folder_without_results_takes_no_figures_away(tmp_path):
    before = page.README.read_text()
    with pytest.raises(Unavailable, match="no results in"):
        page.write(tmp_path)
    assert page.README.read_text() == before


def test_the_readme_has_the_figures_of_the_results():
    text = page.README.read_text()
    message = "run python -m benchmarks readme"
    assert page.written(text, page.README.parent / "results") == text, message
    for name in (*BENCHMARKS, "gpu"):
        assert f"<!-- results of {name} -->" in text


# -- the task --------------------------------------------------------------------------------------


def test_the_perceptron_has_the_parameters_that_the_tables_say():
    assert sum(parameter.numel() for parameter in Task(5).model.parameters()) == 2762


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dataset", DATASETS)
def test_all_loops_come_to_the_same_weights(dataset, optimizer):
    outcomes = set()
    for contender in overhead.rows(12, dataset, optimizer)[:5]:
        with unseen():
            outcomes.add(contender.run().outcome)
    assert len(outcomes) == 1
    other = Task(12, dataset=dataset, optimizer=optimizer)
    other.loss = lambda model, batch: 1.5 * Task.loss(other, model, batch)
    contestants.by_hand(other)
    assert other.lap().outcome not in outcomes  # else the fingerprint would be none


def test_fused_is_fused():
    fused = {name: Task(5, optimizer=name).optimizer().defaults["fused"] for name in OPTIMIZERS}
    assert fused == {"sgd": None, "adamw": None, "fused": True}


def test_the_processes_share_the_batches_out():
    whole = list(Task(3, world_size=2).whole)
    for rank in (0, 1):
        own = list(Task(3, rank=rank, world_size=2).loader)
        assert len(own) == 3
        for mine, each in zip(own, whole[rank::2], strict=True):
            assert torch.equal(mine[0], each[0])


def test_the_logged_metrics_reach_the_record(tmp_path):
    task = Task(6)
    with unseen():
        contestants.defaults(task, metrics=2, log_every=1, project_dir=tmp_path / "run")
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) >= 6
    assert {"train/loss", "metric/0", "metric/1"} <= lines[0].keys()
    assert list((tmp_path / "run").glob("**/events.out.tfevents*"))


# -- each benchmark --------------------------------------------------------------------------------

OURS = [
    "PyTorch loop by hand",
    "Cadence Trainer, everything off",
    "Cadence Trainer, no bar, no checkpoints",
    "Cadence Trainer, defaults",
    "Cadence Trainer, every step written",
    "Cadence Accelerator",
]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_our_loop_copies_to_a_device_as_the_one_by_hand_does(device, monkeypatch):
    class Made(Exception):
        pass

    def accelerator(*, dataloader_config, **_):
        raise Made(dataloader_config.non_blocking)

    monkeypatch.setattr(contestants, "Accelerator", accelerator)
    task = Task(5)
    task.device = device
    with pytest.raises(Made, match=str(device == "cuda")):
        contestants.own_loop(task)


@compiles
def test_overhead():
    result = overhead.run(
        options(
            *("overhead", "--steps", 10, "--repeats", 1, "--rows", "cadence"),
            *("--backend", "aot_eager"),
        )
    )
    assert_measured(result, OURS * 5)
    assert len({row.group for row in result.rows}) == 5


@compiles
def test_all_loops_compile_and_come_to_nearly_the_same_weights():
    by_hand = Task(12)
    contestants.by_hand(by_hand)
    for contender in overhead.rows(12, "compiled", backend="aot_eager")[: len(OURS)]:
        before = counters["stats"]["unique_graphs"]
        with unseen():
            outcome = contender.run().outcome
        assert counters["stats"]["unique_graphs"] > before
        assert nearly_equal(outcome, weights(by_hand.bare))
        assert not nearly_equal(outcome, weights(Task(12).bare))


@pytest.mark.filterwarnings("default")  # what the peers use is theirs
@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
def test_peers_come_to_the_same_weights(peer, monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as importing Lightning does
    for name in peer.needs:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -e '.[peers]'")
    by_hand, other = Task(8), Task(8)
    contestants.by_hand(by_hand)
    with unseen():
        peer.train(other)
    assert other.lap().outcome == by_hand.lap().outcome


def test_every_peer_has_a_row_and_a_pin():
    names = [contender.name for contender in overhead.rows(10)]
    assert names == OURS + [peer.name for peer in peers.PEERS]
    settings = (ROOT / "pyproject.toml").read_text()
    for package in ("accelerate", "lightning", "pytorch-ignite", "transformers"):
        assert f'\n    "{package}==' in settings


def test_data(monkeypatch):
    result = data.run(options("data", "--steps", 6, "--repeats", 1))
    assert_measured(result, data.names() * 10)
    assert data.names() == ["DataLoader", "prepared by Cadence"]
    monkeypatch.setattr(data, "prepared", lambda loader: list(loader)[::-1])
    contenders = data.rows("samples", 0, 6)
    assert contenders[0].run().outcome != contenders[1].run().outcome


def test_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_memory_apart", lambda name, *_: float(len(name)))
    arguments = ("--parameters", 10_000, "--repeats", 2, "--folder", tmp_path / "a" / "new one")
    result = checkpoint.run(options("checkpoint", *arguments))
    names = ["plain file, synced", "torch.save", "torch.save, synced"]
    names += ["Cadence, waiting", "Cadence, in the background"]
    assert [row.name for row in result.rows] == names == checkpoint.names()
    for row in result.rows:
        expected = {"stall", "memory"}
        if row.name != "torch.save":  # it does not wait for the disk
            expected |= {"total", "rate", "disk"}
            assert row.values["total"][0] >= row.values["stall"][0]
        assert row.values.keys() == expected
        assert row.values["memory"] == len(row.name)
        assert len(row.samples["stall"]) == 2
    assert result.rows[0].values["disk"] == [1.0, 1.0, 1.0]
    chosen_rows = checkpoint.run(options("checkpoint", *arguments, "--rows", "background")).rows
    assert [row.name for row in chosen_rows] == [names[0], names[-1]]
    assert list(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "a" / "new one"]  # tidied up


def test_each_way_saves_the_whole_state(tmp_path):
    sizes: dict[str, int] = {}

    def save_all(trainer):
        ways = {name: make(trainer) for name, make in checkpoint.WAYS.items()}
        in_background = ways["Cadence, in the background"]
        assert in_background.finish == trainer.wait_for_save  # until then the disk has not all
        for name, way in ways.items():
            path = tmp_path / name
            way.save(path)
            way.finish()
            files = [path] if path.is_file() else list(path.rglob("*.*"))
            sizes[name] = sum(each.stat().st_size for each in files if each.is_file())
        whole.append(3 * 4 * sum(p.numel() for p in trainer.module.parameters()))

    whole: list[int] = []
    checkpoint.train(checkpoint.Stack(10_000), tmp_path / "run", save_all)
    assert len(sizes) == 5
    assert min(sizes.values()) >= whole[0]


@pytest.mark.parametrize("asked", [1, 10_000, 1_048_577, 1_500_000, 2_000_000, 25_000_000])
def test_the_saved_model_has_about_as_many_parameters_as_asked_for(asked):
    with torch.device("meta"):
        model = checkpoint.Stack(asked)
    assert sum(each.numel() for each in model.parameters()) == pytest.approx(asked, rel=0.002)
    assert max(each.shape[0] for each in model.parameters()) <= checkpoint.WIDTH


def test_the_settings_and_the_title_have_the_parameters_that_were_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_memory_apart", lambda *_: 0.0)
    monkeypatch.setattr(checkpoint, "WIDTH", 300)
    arguments = ("--parameters", 100_000, "--repeats", 1, "--rows", "waiting", "--folder", tmp_path)
    result = checkpoint.run(options("checkpoint", *arguments))
    assert result.settings["parameters"] == 2 * 224**2
    assert result.title.startswith("A save of 1 MB")


def test_a_save_in_the_background_takes_the_memory_of_the_state(tmp_path):
    found = checkpoint._memory_apart("Cadence, in the background", 4_000_000, tmp_path)
    assert found == pytest.approx(48, rel=0.2)  # a third less if it reused that of the gradients
    assert not list(tmp_path.iterdir())


def test_the_memory_of_a_save_is_its_highest(tmp_path):
    def save(path):
        nonlocal held
        held = torch.ones(25_000_000)  # 100 MB
        before = psutil.Process().memory_info().rss
        time_to_look = time.monotonic() + 0.05
        while time.monotonic() < time_to_look:
            pass
        assert before > 100e6
        held = None
        path.write_text("saved")

    held = None
    way = checkpoint.Way(save=save)
    assert 90 < checkpoint.memory_of(way, tmp_path / "file") < 200
    assert not list(tmp_path.iterdir())


def test_logging(monkeypatch):
    monkeypatch.setattr(logs, "METRICS", (3, 20))
    *_, service = logs.GROUPS  # their own processes take seconds to start and to end
    monkeypatch.delitem(logs.GROUPS, service)
    result = logs.run(options("logging", "--steps", 10, "--repeats", 1))
    names = ["no callback", "100 callbacks that override no hook"]
    names += ["100 callbacks with 4 empty hooks per step", "100 callbacks that count the steps"]
    names += ["1 metrics per step", "4 metrics per step", "21 metrics per step"]
    names += ["SummaryWriter.add_scalar", "Cadence, TensorBoard", "Cadence, JSONL"]
    assert_measured(result, names)
    assert logs.names() == names


def test_callbacks_are_called_and_trackers_write(tmp_path, monkeypatch):
    called = []
    for name in ("step_start", "batch_start", "batch_end", "step_end"):
        hook = f"on_train_{name}"
        monkeypatch.setattr(logs.Silent, hook, lambda *_, name=name: called.append(name))
    with unseen():
        logs.callback_rows(6)[2].run()
    assert called == [
        name
        for _ in range(6)
        for name in ("step_start", "batch_start", "batch_end", "step_end")
        for _ in range(100)
    ]
    with logs.tracker(lambda folder: logs.JsonlTracker(folder / "r.jsonl"), tmp_path) as log:
        log(7)
    assert json.loads((tmp_path / "r.jsonl").read_text())["train/loss"] == 0.5


def test_ddp(ranks2):
    def measured():
        # The last is too large for the exchange that small models have: DDP reduces it.
        groups = {"small": ((64,), 1), "deeper": ((64, 64), 5), "reduced": ((1024, 64), 10)}
        with mock.patch.object(ddp, "GROUPS", groups):
            result = ddp.measure(options("ddp", "--steps", 8, "--repeats", 1))
        assert result.settings["processes"] == dist.get_world_size()
        return result

    names = ["DDP loop by hand", "Cadence Trainer, everything off", "Cadence Trainer, defaults"]
    for result in ranks2(measured):
        assert_measured(result, [*names, "Cadence Accelerator"] * 3)
        assert len({row.group for row in result.rows}) == 3
    assert ddp.names() == [*names, "Cadence Accelerator"]


def test_fsdp(ranks2):
    def measured():
        groups = {"small": ((64, 64), 1), "smaller": ((32,), 2)}
        with mock.patch.multiple(fsdp, GROUPS=groups, LAYERS=1):
            return fsdp.measure(options("fsdp", "--steps", 8, "--repeats", 1))

    names = ["FSDP2 loop by hand", "Cadence Trainer, everything off", "Cadence Trainer, defaults"]
    names += ["Cadence Accelerator"]
    for result in ranks2(measured):
        steps, saves = result.rows[:8], result.rows[8:]
        assert [row.name for row in result.rows] == names * 2 + list(fsdp.SAVED)
        assert not any(row.void for row in result.rows)
        assert all({"cpu", "cpu_ratio", "wall", "wall_ratio"} == row.values.keys() for row in steps)
        loads = ["plain files", "torch.distributed.checkpoint"]
        loads += ["Cadence Accelerator, save_state and load_state"]
        assert [row.name for row in saves if "load" in row.values] == loads
        assert all({"save", "stall"} <= row.values.keys() for row in saves)
        assert all(row.group == "a checkpoint of 13 MB" for row in saves)
    assert fsdp.names() == [*names, *fsdp.SAVED]


def test_each_process_uses_one_thread(monkeypatch, capfd):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    arguments = ("--processes", 2, "--steps", 3, "--repeats", 1, "--rows", "by hand")
    result = ddp.run(options("ddp", *arguments))
    assert result.machine["threads"] == "torch threads 1"
    assert "OMP_NUM_THREADS" not in capfd.readouterr().err


def test_import(monkeypatch):
    statements = {"import json": (), "import email.mime.text": (), "import no_such": ("no_such",)}
    assert list(imports.STATEMENTS)[:3] == [
        "import torch",
        "import trainer",
        "from trainer import Trainer, TrainModule",
    ]
    monkeypatch.setattr(imports, "STATEMENTS", statements)
    result = imports.run(options("import", "--repeats", 2))
    first, second, third = result.rows
    assert first.values["modules"] < second.values["modules"]  # each in a process of its own
    assert third.void == "not installed: no_such"
    assert len(second.samples["wall_ratio"]) == 2


def test_memory(monkeypatch):
    def measured(name, steps, wide):
        return memory.measure(memory.KINDS[name], steps, wide=wide)

    monkeypatch.setattr(memory, "_measured_apart", measured)
    monkeypatch.setattr(memory, "WIDTH", 500)
    narrow = ("--steps", 60, "--wide-steps", 3, "--repeats", 1, "--rows", "accelerator", "the same")
    result = memory.run(options("memory", *narrow))
    names = ["PyTorch loop by hand", "the same, with TensorBoard", "Cadence Accelerator"]
    assert [row.name for row in result.rows] == names * 2
    assert result.rows[0].values["ratio"] == 1.0
    assert result.rows[2].values.keys() == {"peak", "ratio", "growth", "per_step"}
    assert result.rows[5].values.keys() == {"peak", "ratio"}


def test_growth_is_what_the_steps_leave_behind():
    kept = []

    def leaks(task):
        for batch in task.loader:
            task.loss(task.model, batch)
            kept.append(torch.ones(250_000))  # 1 MB

    assert memory.measure(leaks, 50, wide=False)["growth"] == pytest.approx(39e6, rel=0.1)
    kept.clear()
    (row,) = memory.table(lambda name: {"peak": 2e6, "growth": 4e4}, ["a"], 1, counted=40)
    assert row.values == {"peak": 2.0, "ratio": 1.0, "growth": 40.0, "per_step": 1000.0}


def test_memory_is_measured_in_a_process_of_its_own():
    found = memory._measured_apart("Cadence Accelerator", 20, wide=False)
    assert found.keys() == {"peak", "growth"}
    assert found["peak"] > 50e6


@compiles
def test_transformer(monkeypatch, tmp_path):
    monkeypatch.setattr(transformer, "TRACE", tmp_path / "trace.json")
    result = transformer.run(
        options(
            *("transformer", "--tiny", "--backend", "eager", "--steps", 5, "--repeats", 1),
            *("--rows", "cadence"),
        )
    )
    assert [row.name for row in result.rows] == [
        "PyTorch loop by hand",
        "Cadence Trainer",
        "Cadence Accelerator",
    ]
    for row in result.rows:
        assert row.void is None
        per_step = TINY.batch * TINY.context
        for tokens, milliseconds in zip(row.samples["tokens"], row.samples["step"], strict=True):
            assert tokens * milliseconds / 1e3 == pytest.approx(per_step)
    names = {
        event.get("name")
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    }
    assert "aten::embedding" in names


def test_scale(monkeypatch):
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    small |= {"vocab_size": 128, "num_attention_heads": 8}
    monkeypatch.setattr(scale, "LLAMA", small)
    monkeypatch.setattr(scale, "PROCESSES", (8, 16))
    monkeypatch.setattr(scale, "TOKENS", 32)
    result = scale.run(options("scale", "--repeats", 1, "--rows", "processes"))
    ends = {8: ["8 processes, rank 0", "8 processes, rank 7"]}
    ends[16] = ["16 processes, rank 0", "16 processes, rank 15"]
    result.columns = [each for each in result.columns if each not in pipeline.COLUMNS]
    assert_measured(result, [*ends[8], *ends[16], *ends[16], *ends[8], *ends[16]])
    assert scale.names() == [*ends[8], *ends[16], *pipeline.names()]
    number = 2 * 128 * 64 + 64 + 3 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64)
    fsdp8, fsdp16, hsdp, tp8, tp16 = result.rows[::2]
    for row, parts in ((fsdp8, 8), (fsdp16, 16), (hsdp, 8)):
        assert (
            row.values["parameters"]
            == row.values["gradients"]
            == pytest.approx(4 * number / parts / 1e9)
        )
        steps = 4 * (3 * 9 + 3)  # the number of steps of each parameter
        assert row.values["optimizer"] == pytest.approx(2 * row.values["parameters"] + steps / 1e9)
        assert row.values["file"] == pytest.approx(3 * row.values["parameters"])
        # the root once, and each of the three blocks before forward and before backward
        assert row.values["all-gather"] == 1 + 2 * 3
        assert row.values["reduce-scatter"] == 1 + 3
    assert [row.values["files"] for row in result.rows[::2]] == [8, 16, 8, 8, 16]
    assert hsdp.values["all-reduce"] == fsdp8.values["all-reduce"] + 1 + 3
    assert result.rows[5].values["file"] == 0  # its replica is not the first
    alike = 4 * (3 * 2 + 1) * 64  # norms, which each of the processes that share layers has
    if "model.embed_tokens" not in scale.Language().model.tp_plan:  # in some transformers
        alike += 4 * 128 * 64
    whole = 8 * tp8.values["parameters"] * 1e9
    assert whole == pytest.approx(4 * number + 7 * alike)
    assert tp16.values["all-reduce"] >= tp8.values["all-reduce"] > fsdp8.values["all-reduce"]


def test_pipelines(ranks2):
    def measured():
        with mock.patch.multiple(pipeline, SECONDS=0.0, WIDTH=4, MICRO_BATCHES=(4,)):
            return pipeline.measure(options("scale", "--repeats", 2)), pipeline.names()

    for result, names in ranks2(measured):
        assert [row.name for row in result.rows] == names
        gpipe, one_f_one_b, interleaved = (row.values for row in result.rows)
        assert gpipe["bubble"] == one_f_one_b["bubble"] == pytest.approx(100 / 5)
        assert interleaved["bubble"] == pytest.approx(100 / 9)
        assert all(0 < share <= 100 for row in result.rows for share in row.samples["idle"])
        # of four layers on each process, for each micro-batch whose backward has not run
        assert gpipe["kept"] == pytest.approx(4 * 4 * 16 / 1e6)
        assert one_f_one_b["kept"] == pytest.approx(4 * 2 * 16 / 1e6)


def test_the_transformer_has_124_million_parameters():
    size = Size()
    with torch.device("meta"):
        model = Gpt(size)
    number = sum(parameter.numel() for parameter in model.parameters())
    assert round(number / 1e6) == 124
    # 6 (N - places) + 12 L d T, see PaLM
    assert flops_per_token(model, size) == 6 * (number - 1024 * 768) + 12 * 12 * 768 * 1024


@pytest.mark.parametrize("benchmark", ["checkpoint", "memory"])
def test_without_psutil_what_needs_it_says_so(benchmark, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert main([benchmark]) == 3
    assert "pip install psutil" in capsys.readouterr().err


def test_without_a_device_the_transformer_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unavailable, match="--tiny"):
        transformer.run(options("transformer"))
    assert main(["transformer"]) == 3
    assert "needs a CUDA device" in capsys.readouterr().err


# -- a GPU, tried on the CPU -----------------------------------------------------------------------


@pytest.fixture
def in_this_process(monkeypatch):
    """Measures the sections here: the libraries of the peers take seconds to import."""

    def measured(name, seconds, folder, dry_run):
        assert dry_run
        isolation.reset_trainer_state()
        ends = time.time() + seconds
        run = gpu_sections.Run(device="cpu", tiny=True, ends=ends, keep=[].append, folder=folder)
        try:
            result = asdict(gpu_sections.SECTIONS[name].measure(run))
        except Unavailable as reason:
            return {"state": "skipped", "why": str(reason)}
        failures = gpu._failures(result)
        return {"state": "failed" if failures else "measured", "error": failures, "result": result}

    monkeypatch.setattr(gpu, "_measured", measured)


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # what the peers use is theirs
def test_every_section_of_the_gpu_runs_small_on_the_cpu(in_this_process, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    arguments = ["gpu", "--dry-run", "--budget", "850", "--output", str(tmp_path / "out")]
    assert main(arguments) == 0, capsys.readouterr()
    sections = json.loads((tmp_path / "out" / "gpu.json").read_text())["sections"]
    assert [*sections] == [*gpu_sections.SECTIONS]
    absent = [] if importlib.util.find_spec("torchao") else ["fp8"]
    assert [name for name in sections if sections[name]["state"] != "measured"] == absent
    for name in absent:
        assert sections.pop(name)["why"] == "torchao is not installed"
    for entry in sections.values():
        for row in entry["result"]["rows"]:
            missing = (row["void"] or "not installed: ").partition("not installed: ")[2]
            for package in filter(None, missing.split(", ")):
                assert importlib.util.find_spec(package) is None
            assert row["values"] or missing or entry["result"]["benchmark"] == "memory"
    told = " ".join(sections["fsdp"]["result"]["notes"])
    assert told.count("the same bits") == 4  # DDP, FSDP2, and the same resumed
    assert all(row["values"]["waits"] == 0 for row in sections["syncs"]["result"]["rows"])
    text = page.section(tmp_path / "out" / "gpu.json")
    assert all(f"**{name}**" in text for name in gpu_sections.SECTIONS)


def test_a_section_is_measured_in_a_process_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "RUNS", tmp_path / "runs")
    arguments = ["gpu", "--dry-run", "--only", "copies", "--output", str(tmp_path / "out")]
    assert main(arguments) == 0, capsys.readouterr()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"gpu.json", "gpu.log"}
    (entry,) = json.loads((tmp_path / "out" / "gpu.json").read_text())["sections"].values()
    assert entry["state"] == "measured"
    assert [bool(row["values"]) for row in entry["result"]["rows"]] == [True, True]
    assert (tmp_path / "runs" / "copies-trace.json").exists()  # in the folder of that process


def test_a_section_that_does_not_fit_the_budget_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "RUNS", tmp_path / "runs")
    arguments = ["gpu", "--dry-run", "--output", str(tmp_path), "--budget", "1", "--only"]
    assert main([*arguments, "fp8,host"]) == 0
    assert main([*arguments, "syncs"]) == 0  # beside what was measured before
    sections = json.loads((tmp_path / "gpu.json").read_text())["sections"]
    assert [*sections] == ["host", "fp8", "syncs"]
    for entry in sections.values():
        assert entry["state"] == "skipped"
        assert "of the budget left" in entry["why"]


def test_a_section_at_its_limit_ends_with_what_it_has_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "RUNS", tmp_path)
    entry = gpu._measured("tokens", 0.2, tmp_path, True)
    assert entry["state"] == "failed"
    assert "ended at its limit" in entry["error"]
    shell = "sleep 1000 & echo $!; wait"
    with subprocess.Popen(
        ["sh", "-c", shell], stdout=subprocess.PIPE, start_new_session=True
    ) as started:
        child = psutil.Process(int(started.stdout.readline()))
        gpu._end(started)
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_without_a_device_the_gpu_is_not_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["gpu", "--output", str(tmp_path)]) == 3
    assert "--dry-run" in capsys.readouterr().err


def a_run(tmp_path, kept, seconds=1000.0):
    ends = time.time() + seconds
    return gpu_sections.Run(device="cpu", tiny=True, ends=ends, keep=kept.append, folder=tmp_path)


def test_a_row_that_fails_stops_no_other_and_rows_without_time_say_so(tmp_path):
    seen, kept = [], []

    def finish(rows):
        result = small_result()
        result.rows = rows
        return result

    def measured(run, *contenders):
        return gpu_sections.rounds(
            run, contenders, 2, finish, unit=1.0, agree=lambda one, other: one == other
        ).rows

    one = [playing("one", [1.0, 2.0], seen), playing("fails", [], seen)]
    first, failed, other = measured(a_run(tmp_path, kept), *one, playing("other", [3.0, 4.0], seen))
    assert failed.void.startswith("StopIteration")
    assert "StopIteration" in gpu._failures({"rows": [vars(failed)]})
    assert first.samples["wall"] == [1.0, 2.0]
    assert other.samples["wall_ratio"] == [3.0, 2.0]
    assert len(kept) == 5
    late = measured(a_run(tmp_path, kept, seconds=-1), playing("one", [], seen))
    assert late[0].void == gpu_sections.NO_TIME
    assert not gpu._failures({"rows": [vars(late[0])]})
    laps = {
        "one": [Lap(wall=2.0, cpu=1.0)],
        "two": [Lap(wall=3.0, cpu=1.0), Lap(wall=4.0, cpu=1.0)],
    }
    both = [playing("one", [], seen), playing("two", [], seen)]
    rows = gpu_sections._rows(both, laps, {}, 1, 1.0, lambda a, b: True)  # one's warm-up alone
    assert [row.samples["wall"] for row in rows] == [[2.0], [4.0]]
    assert "wall_ratio" not in rows[1].samples  # its round is not the reference's
    broken = measured(a_run(tmp_path, kept), playing("one", [], seen), playing("two", [], seen))
    assert broken[1].void == gpu_sections.NO_TIME  # without the reference it would say nothing


def test_a_batch_that_is_too_large_is_halved(tmp_path):
    def measure(size, notes):
        if size.batch == TINY.batch:
            raise torch.OutOfMemoryError
        return notes

    notes = gpu_sections.halving(a_run(tmp_path, []), measure)
    assert notes == ["Out of memory: the batch was halved to 1."]


def test_calls_that_wait_for_the_device_are_listed_with_their_places():
    def loop(mode):
        if mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    modes = []
    ((place, number),) = gpu_sections.waits(loop, modes.append).items()
    assert (number, modes) == (3, ["default", "default"])
    assert "tests/test_benchmarks.py:" in place
    assert not gpu_sections.waits(lambda mode: None, modes.append)
    with pytest.raises(ZeroDivisionError):  # which is no wait
        gpu_sections.waits(lambda mode: 1 // (mode == "warn"), modes.append)


def event(category, name, begin, duration):
    return {"cat": category, "name": name, "ts": begin, "dur": duration}


def test_overlap_is_the_share_of_copies_behind_kernels():
    events = [
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 10),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 100, 10),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 50, 10),
        event("kernel", "gemm", 5, 50),
        event("kernel", "another stream", 6, 3),
        event("kernel", "gelu", 108, 1),
        {"name": "no time of its own"},
    ]
    assert transformer.overlap({"traceEvents": events}) == pytest.approx((5 + 1) / 20)
    assert transformer.overlap({"traceEvents": events[3:]}) is None


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def instant(monkeypatch):
    """Benchmarks that take no time, one of which cannot run here."""
    asked = []

    def run(name, given):
        asked.append((name, given))
        if name == "transformer":
            raise Unavailable("no device")
        result = small_result(repeats=given.repeats)
        result.benchmark = name
        result.rows[0].values["cpu_ratio"] = [1.1, 1.0, 1.2]
        return result

    for name, module in BENCHMARKS.items():
        changed = {"REPEATS": 3, "run": partial(run, name), "__doc__": "Doc."}
        monkeypatch.setitem(BENCHMARKS, name, Namespace(**(vars(module) | changed)))
    return asked


def test_a_benchmark_is_shown_and_written(instant, tmp_path, capsys):
    assert main(["data", "--steps", "7", "--output", str(tmp_path / "out")]) == 0
    ((name, given),) = instant
    assert (name, given.steps, given.repeats, given.rows) == ("data", 7, 3, [])
    shown = capsys.readouterr().out
    assert small_result().table() in shown
    assert "A note." in shown
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data.json"]


def test_a_choice_of_rows_or_of_a_length_replaces_no_whole_result(instant, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.__main__.RESULTS", tmp_path / "results")
    for options in (["--rows", "cadence"], ["--steps", "5"], ["--repeats", "9"]):
        assert main(["data", *options]) == 0
        assert not (tmp_path / "results").exists()
    assert main(["data"]) == 0
    assert (tmp_path / "results" / "data.json").exists()


def test_all_goes_on_where_one_cannot_run(instant, tmp_path, capsys):
    assert main(["all", "--output", str(tmp_path)]) == 3
    assert [name for name, _ in instant] == list(BENCHMARKS)
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {f"{name}.json" for name in BENCHMARKS if name != "transformer"} | {
        "overhead.svg"
    }
    assert "no device" in capsys.readouterr().err
    drawn = (tmp_path / "overhead.svg").read_bytes()
    assert main(["chart", "--output", str(tmp_path)]) == 0
    assert len((tmp_path / "overhead.svg").read_bytes()) == len(drawn)


def test_the_published_chart_is_that_of_the_published_figures(tmp_path):
    pytest.importorskip("matplotlib")
    published = ROOT / "benchmarks" / "results"
    shutil.copy(published / "overhead.json", tmp_path)
    texts = [
        re.findall("<!-- (.*) -->", path.read_text())
        for path in (draw(tmp_path), published / "overhead.svg")
    ]
    assert texts[0] == texts[1]


def test_a_chart_of_nothing_is_refused(tmp_path, capsys):
    assert main(["chart", "--output", str(tmp_path)]) == 3
    assert "python -m benchmarks overhead" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["data", "--repeats", "0"], "--repeats: 0 is too few; at least 1."),
        (["data", "--repeats", "two"], "--repeats: invalid number value: 'two'"),
        (["data", "--steps", "2"], "--steps: 2 is too few; at least 3."),
        (["memory", "--wide-steps", "2"], "--wide-steps: 2 is too few; at least 3."),
        (["ddp", "--processes", "0"], "--processes: 0 is too few; at least 1."),
        (["checkpoint", "--parameters", "0"], "--parameters: 0 is too few; at least 1."),
        (["checkpoint", "--folder", __file__], f"--folder: {__file__} is a file"),
        (["transformer", "--backend", "nonsense"], "--backend: 'nonsense' is no backend; one of"),
        (["transformer", "--backend", "no"], "--backend: 'no' is no backend; one of aot_eager,"),
        (["checkpoint", "--steps", "3"], "unrecognized arguments: --steps 3"),
        (["data", "--step", "3"], "unrecognized arguments: --step 3"),
        (["import", "--steps", "3"], "unrecognized arguments: --steps 3"),
        (["gpu", "--only", "tokens,speed"], "--only: 'speed' is no section; some of tokens,"),
        (["speed"], "invalid choice: 'speed'"),
        ([], "required: benchmark"),
    ],
)
def test_wrong_arguments_are_refused(arguments, text, instant, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
    assert not instant  # nothing was measured


@pytest.mark.parametrize("command", ["data", "all", "chart"])
@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_file_in_place_of_the_folder_is_refused(command, path, instant, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main([command, "--output", str(tmp_path / path)])
    assert ended.value.code == 2
    assert f"--output: {tmp_path / 'file'} is a file" in capsys.readouterr().err
    assert not instant


@pytest.mark.parametrize("option", ["output", "folder"])
def test_a_folder_that_cannot_be_used_is_refused_before_the_measurement(
    option, instant, tmp_path, monkeypatch, capsys
):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    folder = tmp_path / "new" / "one"
    arguments = ["checkpoint", f"--{option}", str(folder)]
    for what in (Path, "mkdir"), (tempfile, "TemporaryFile"):  # cannot be made, cannot be written
        with monkeypatch.context() as patch:
            patch.setattr(*what, refuse)
            with pytest.raises(SystemExit) as ended:
                main(arguments)
        assert ended.value.code == 2
        assert f"--{option}: {folder}: Permission denied" in capsys.readouterr().err
    assert not instant
    monkeypatch.setattr("benchmarks.__main__.RESULTS", tmp_path)
    main(arguments)
    assert folder.is_dir()
    assert len(instant) == 1


@pytest.mark.parametrize("name", [*BENCHMARKS, "all"])
def test_rows_that_do_not_exist_are_refused_with_those_that_do(name, instant, capsys):
    names = [row for each in BENCHMARKS.values() for row in each.names()]
    if name != "all":
        names = BENCHMARKS[name].names()
    with pytest.raises(SystemExit) as ended:
        main([name, "--rows", names[-1].upper(), "no such row"])
    assert ended.value.code == 2
    _, rows = capsys.readouterr().err.split("--rows: 'no such row' is in no row's name. The rows:")
    assert {row.strip() for row in rows.strip().splitlines()} == set(names)
    assert not instant


def test_all_with_a_choice_of_rows_leaves_out_who_has_none_of_them(instant):
    assert main(["all", "--rows", "dataloader", "import t"]) == 0
    assert [(name, given.rows) for name, given in instant] == [
        ("data", ["dataloader"]),
        ("import", ["import t"]),
    ]


def test_every_benchmark_has_the_common_options():
    for name, module in BENCHMARKS.items():
        given = options(name)
        assert getattr(given, "steps", None) == getattr(module, "STEPS", None)
        assert given.repeats == module.REPEATS
        assert (given.output, given.rows) == (None, [])
