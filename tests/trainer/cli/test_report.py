"""The command `trainer report`: what the page says is what the run's folder holds."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, ModelCheckpoint
from tests.helpers.pages import Node, parse
from trackers.jsonl import read_metrics
from trainer import Trainer, TrainModule
from trainer.checkpoint.lock import alone_in
from trainer.cli import main
from trainer.cli.report.charts import (
    axes_of,
    charts_of,
    is_logarithmic,
    is_noisy,
    smoothed,
    ticks_of,
)
from trainer.cli.run_summary import thinned
from trainer.cli.runs import Series, read_runs

NASTY = "<script>alert('x')</script> & \"co\""
BEGAN = 1_700_000_000.0


def write_run(folder, records, *, about=None, torn=""):
    """A run's folder with a record, each of whose items is (step, epoch, seconds, values)."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    lines = [
        json.dumps({"step": step, "epoch": epoch, "time": BEGAN + seconds, **values})
        for step, epoch, seconds, values in records
    ]
    text = "".join(f"{line}\n" for line in lines) + torn
    (folder / "metrics.jsonl").write_text(text)
    if about is not None:
        (folder / "run.json").write_text(json.dumps({"run_id": "1", "warnings": [], **about}))
    return folder


def noisy(count, *, name="train/loss", seed=0):
    draw = random.Random(seed)
    return [(i, (i - 1) // 10, i * 0.5, {name: draw.gauss(5, 1)}) for i in range(1, count + 1)]


def start(begin, end=None, status="running", step=0, error=None):
    end = None if end is None else BEGAN + end
    return {"begin": BEGAN + begin, "step": step, "end": end, "status": status, "error": error}


def report(*folders, **options) -> Node:
    words = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    assert main(["report", *map(str, folders), *words]) == 0
    return parse(Path(options.get("output", "report.html")).read_text())


def section(html: Node, title: str) -> Node:
    (found,) = [
        each for each in html.all("section") for head in each.all("h2") if head.text == title
    ]
    return found


def titles(html: Node) -> list[str]:
    return [each.text for each in html.all("h2")]


def data_of(node: Node) -> str | None:
    values = node.all("data")
    return values[0]["value"] if values else None


def lines_of(html: Node, title: str, kind: str, axis: str = "step") -> list[Node]:
    """The paths of a chart's lines of a class."""
    (figure,) = [
        each
        for each in html.all("figure", "chart")
        if each.all("figcaption")[0].all("b")[0].text == title
    ]
    (box,) = figure.all("div", f"axis-{axis}")
    return [path for group in box.all("g", kind) for path in group.all("path", "curve")]


def points_of(path: Node) -> np.ndarray:
    return np.array(re.findall(r"-?[\d.]+", path["d"]), float).reshape(-1, 2)


# -- a run of the Trainer --------------------------------------------------------------------------


class Net(TrainModule):
    def __init__(self, width=3, note=NASTY):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("train/loss", loss)
        self.log(f"odd {NASTY}", float("inf") if self.trainer.global_step == 5 else 1.5)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


IMAGE = torch.arange(6 * 9).reshape(1, 6, 9).to(torch.uint8)


class Draw(Callback):
    def on_validation_end(self, trainer, module):
        for tracker in () if trainer.sanity_checking else trainer.trackers:
            tracker.log_images({"sample": IMAGE + trainer.global_step}, trainer.global_step)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fitted") / "net"
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(20, 3)), batch_size=4)
    trainer = Trainer(
        max_epochs=6,
        log_every=1,
        seed=1,
        cpu=True,
        progress_bar=False,
        project_dir=folder,
        log_with="tensorboard",
        callbacks=[ModelCheckpoint(monitor="val/loss", save_top_k=2, background=False), Draw()],
    )
    trainer.fit(Net(), data, data)
    trainer.validate(Net(), data)
    return folder


def test_the_values_are_those_of_the_record(fitted):
    html = report(fitted)
    records = read_metrics(fitted / "metrics.jsonl")
    expected = []
    for name in dict.fromkeys(name for record in records for name in record):
        if name in ("step", "epoch", "time"):
            continue
        pairs = [(record[name], record["step"]) for record in records if name in record]
        finite = [pair for pair in pairs if math.isfinite(pair[0])]
        low = min(finite, key=lambda pair: pair[0])
        high = max(finite, key=lambda pair: pair[0])
        row = [*pairs[-1], *low, *high, len(pairs), len(pairs) - len(finite)]
        expected.append([name, *map(repr, row)])
    rows = section(html, "Values").rows()
    assert [[cells[0].text, *map(data_of, cells[1:])] for cells in rows] == expected
    assert len(expected) == 3


def test_the_overview_says_what_the_run_is(fitted):
    html = report(fitted)
    (row,) = section(html, "Runs").rows()
    heads = [head.text for head in section(html, "Runs").all("thead")[0].all("th")]
    cells = dict(zip(heads, row, strict=True))
    about = json.loads((fitted / "run.json").read_text())
    losses = [
        (record["val/loss"], record["step"])
        for record in read_metrics(fitted / "metrics.jsonl")
        if "val/loss" in record
    ]
    assert cells["run"].text == "net"
    assert cells["status"].text == "finished"
    assert [each["value"] for each in cells["best"].all("data")] == list(map(repr, min(losses)))
    assert "min val/loss" in cells["best"].text
    assert cells["updates"].text == "30"
    assert cells["epochs"].text == "6"
    assert cells["processes"].text == "1"
    assert cells["torch"].text == torch.__version__
    assert cells["module"].text == "Net"
    (begin,) = about["starts"]
    assert cells["began"].all("time")[0]["datetime"].startswith("20")
    assert read_runs([fitted])[0].seconds == begin["end"] - begin["begin"]


def test_the_hyper_parameters_and_the_arguments_are_those_of_the_run(fitted):
    rows = section(report(fitted), "Hyper-parameters").rows()
    shown = {(kind.text, name.text): value.text for name, kind, value in rows}
    assert shown["hyper-parameter", "width"] == "3"
    assert shown["hyper-parameter", "note"] == NASTY
    assert shown["Trainer", "max_epochs"] == "6"
    assert shown["Trainer", "log_every"] == "1 step"


def test_the_checkpoints_the_best_and_the_last_are_marked(fitted):
    rows = section(report(fitted), "Checkpoints").rows()
    manifests = {
        path.parent.name: json.loads(path.read_text())
        for path in fitted.glob("checkpoints/*/manifest.json")
    }
    assert {row[0].text for row in rows} == set(manifests)
    for row in rows:
        first = row[2].all("span", "pair")[0]
        assert first.text.startswith("val/loss ")
        assert data_of(first) == repr(manifests[row[0].text]["metrics"]["val/loss"])
        assert row[5].text == "sound"
    best = min(manifests, key=lambda name: manifests[name]["metrics"]["val/loss"])
    marked = [(row[0].text, role.text) for row in rows for role in row[1].all("b")]
    assert sorted(marked) == sorted([(best, "best val/loss"), (max(manifests), "last")])


def test_images_are_those_that_were_logged(fitted):
    from PIL import Image

    figures = section(report(fitted), "Images").all("figure")
    assert [each.text for each in figures] == [f"update {step}" for step in (5, 20, 25, 30)]
    for figure, step in zip(figures, (5, 20, 25, 30), strict=True):
        source = figure.all("img")[0]["src"]
        image = Image.open(io.BytesIO(base64.b64decode(source.partition("base64,")[2])))
        pixels = np.asarray(image.convert("L"))
        assert np.array_equal(pixels, (IMAGE[0] + step).numpy())


def test_evaluations_outside_the_fit_have_a_part_of_their_own(fitted):
    (record,) = read_metrics(fitted / "evaluations.jsonl")
    (row,) = section(report(fitted), "Evaluations").rows()
    assert row[0].text == "val/loss"
    assert data_of(row[1]) == repr(record["val/loss"])


def test_the_page_can_fetch_nothing_and_has_no_script(fitted):
    html = report(fitted)
    assert html.all("script") == []
    assert html.all("link") == []
    (policy,) = [each for each in html.all("meta") if each["http-equiv"]]
    assert policy["content"].startswith("default-src 'none'")
    for node in html.walk():
        for name, value in node.attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href"):
                assert value.startswith(("data:image/png;base64,", "#"))
            assert "url(" not in (value or "").replace("url(#", "")
    assert "url(" not in html.all("style")[0].text


def test_every_id_is_there_once_and_every_reference_leads_to_one(fitted):
    html = report(fitted, fitted.parent / "net")
    ids = [node["id"] for node in html.walk() if node["id"]]
    assert len(ids) == len(set(ids))
    for node in html.walk():
        for value in node.attributes.values():
            for target in re.findall(r"^#([\w-]+)$|url\(#([\w-]+)\)", value or ""):
                assert "".join(target) in ids


def test_names_and_texts_of_a_run_are_escaped(tmp_path):
    folder = tmp_path / "a<b>&c"
    write_run(
        folder,
        [(1, 0, 1, {NASTY: 1.0}), (2, 0, 2, {f"<i>/{NASTY}": 2.0, "<i>/x": 1.0})],
        about={
            "module": NASTY,
            "code": NASTY,
            "starts": [start(0, 3, "failed", error=f"ValueError: {NASTY}")],
            "warnings": [{"time": BEGAN, "logger": "trainer.x", "text": NASTY}],
            "hyper_parameters": {NASTY: {"deep": NASTY}},
        },
    )
    html = report(folder, title=NASTY)
    assert html.all("script") == []
    assert html.all("title")[0].text == html.all("h1")[0].text == NASTY
    assert "a<b>&c" in section(html, "Runs").text
    assert section(html, "Runs").all("code")[0]["title"] == NASTY
    assert NASTY in section(html, "Other metrics").text
    assert f"ValueError: {NASTY}" in section(html, "Warnings and events").text
    assert f"{NASTY}.deep" in section(html, "Hyper-parameters").text
    assert "<i>" in titles(html)


# -- curves ----------------------------------------------------------------------------------------


def test_a_curve_goes_through_the_values_of_the_record():
    records = noisy(30)
    write_run("run", records)
    (path,) = lines_of(report("run"), "loss", "raw")
    drawn = points_of(path)
    steps = np.array([record[0] for record in records])
    values = np.array([record[3]["train/loss"] for record in records])
    # Pixels are linear in both: two corners give the scale.
    across = np.interp(steps, [1, 30], drawn[[0, -1], 0])
    low, high = drawn[:, 1].max(), drawn[:, 1].min()  # downwards
    up = np.interp(values, [values.min(), values.max()], [low, high])
    assert low - high > 80
    assert np.abs(np.interp(across, drawn[:, 0], drawn[:, 1]) - up).max() < 0.8


@pytest.mark.parametrize("weight", [0.0, 0.9])
def test_smoothing_is_the_debiased_average_of_all_values_so_far(weight):
    values = np.random.default_rng(0).normal(3, 1, 80)
    values[[0, 30, 31]] = np.nan, np.inf, np.nan
    result = smoothed(values, weight)
    for i, value in enumerate(values):
        if not np.isfinite(value):
            assert result[i] == value or (np.isnan(result[i]) and np.isnan(value))
            continue
        before = values[: i + 1][np.isfinite(values[: i + 1])]
        weights = weight ** np.arange(len(before))[::-1]
        assert result[i] == pytest.approx((weights * before).sum() / weights.sum(), rel=1e-12)


def test_only_noisy_curves_are_smoothed():
    assert is_noisy(np.random.default_rng(0).normal(0, 1, 20))
    assert not is_noisy(np.random.default_rng(0).normal(0, 1, 19))
    assert not is_noisy(np.repeat(np.arange(20.0), 10))
    assert not is_noisy(np.concatenate([np.linspace(0, 1, 100), np.linspace(1, 0, 100)]))
    assert not is_noisy(np.full(50, np.nan))
    write_run("run", [(i, 0, i, {"lr": 0.1 * i, "loss": (-1.0) ** i}) for i in range(1, 60)])
    html = report("run")
    assert len(lines_of(html, "lr", "plain")) == 1
    assert lines_of(html, "lr", "ema-09") == []
    assert len(lines_of(html, "loss", "ema-09")) == 1


def test_a_long_curve_keeps_the_extremes_of_every_column():
    x = np.arange(50_000.0)
    y = np.random.default_rng(0).normal(0, 1, len(x))
    y[31_234], y[1_000:1_003] = 100.0, (np.nan, np.inf, np.nan)
    thin_x, thin_y = thinned(x, y, 100)
    assert len(thin_x) <= 302
    assert (np.diff(thin_x) > 0).all()
    assert np.nanmax(thin_y) == 100.0
    assert thin_x[0] == 0
    assert thin_x[-1] == x[-1]
    assert set(thin_x[np.isnan(thin_y)]) == {1000.0}
    for column in range(100):
        inside = (x >= column * 499.99) & (x < (column + 1) * 499.99)
        of_column = y[inside & np.isfinite(y)]
        kept = thin_y[(thin_x >= column * 499.99) & (thin_x < (column + 1) * 499.99)]
        assert {of_column.min(), of_column.max()} <= set(kept)
    assert {(a, b) for a, b in zip(thin_x, thin_y, strict=True) if b == b} <= set(
        zip(x, y, strict=True)
    )


def test_values_that_are_not_finite_are_marked_and_listed():
    values = ["NaN", 1.0, 2.0, "Infinity", "-Infinity", 3.0, *[1.0, 2.0] * 12]
    write_run("run", [(i * 10, 0, i, {"loss": v}) for i, v in enumerate(values, start=1)])
    html = report("run")
    assert "3 not finite" in section(html, "Other metrics").text
    marks = html.all("div", "axis-step")[0].all("g", "bad")
    assert len(marks) == 3  # one of each kind
    assert [path["d"].count("M") for mark in marks for path in mark.all("path")] == [1, 1, 1]
    events = section(html, "Warnings and events").text
    assert "loss is NaN, Infinity, -Infinity 3 times, at update 10, 40 to 50" in events
    (path,) = lines_of(html, "loss", "raw")
    assert path["d"].count("M") == 2  # a gap between the two that are infinite


@pytest.mark.parametrize(
    "values",
    [
        [1e308, -1e308],
        [1e-320, 2e-320],
        [1e9, 1e9 + 1e-6],
        [7],
        ["NaN", "NaN"],
        [0, 1e-7],
        [1e-9, 5],
    ],
)
def test_a_chart_of_any_values_has_a_frame_with_round_labels(values):
    write_run("run", [(i, 0, i, {"x": value}) for i, value in enumerate(values, start=1)])
    (svg,) = report("run").all("div", "axis-step")[0].all("svg")
    for path in svg.all("path"):
        assert re.fullmatch(r"[MLHVmlhvz0-9. -]+", path["d"])  # no nan, no inf
    rows = [text.text for text in svg.all("text") if text["text-anchor"] == "end"]
    assert 2 <= len(set(rows)) == len(rows) <= 8


def test_grid_lines_are_round_and_their_labels_tell_them_apart():
    values, labels = zip(*ticks_of(0.63, 1.01, 5), strict=True)
    assert values == pytest.approx((0.7, 0.8, 0.9, 1.0))
    assert labels == ("0.7", "0.8", "0.9", "1")
    labels = [label for _, label in ticks_of(-0.3, 0.3, 5)]
    assert labels == ["\N{MINUS SIGN}0.2", "0", "0.2"]
    assert [label for _, label in ticks_of(11_800, 13_300, 5)] == ["12k", "12.5k", "13k"]
    assert [label for _, label in ticks_of(0, 600, 3)] == ["0", "200", "400", "600"]
    assert [label for _, label in ticks_of(0, 6e5, 3)] == ["0", "200k", "400k", "600k"]
    assert [label for _, label in ticks_of(1, 3, 6, whole=True)] == ["1", "2", "3"]
    assert [label for _, label in ticks_of(40_321, 40_324, 3)] == [
        *("40.321k", "40.322k", "40.323k", "40.324k")
    ]


# -- which charts and axes -------------------------------------------------------------------------


def test_metrics_share_a_chart_where_only_the_stage_differs():
    names = ["val/loss", "train/loss_step", "train/loss_epoch", "val_acc", "train_acc", "odd"]
    names += ["device/a", "device/b", "throughput/x", "gan/d", "gan/g", "alone/x", "time_step"]
    charts = [(chart.section, chart.title, chart.members) for chart in charts_of(names)]
    assert charts == [
        ("train", "loss", ["train/loss_step", "train/loss_epoch", "val/loss"]),
        ("train", "acc", ["train_acc", "val_acc"]),
        ("gan", "d", ["gan/d"]),
        ("gan", "g", ["gan/g"]),
        ("", "odd", ["odd"]),
        ("", "alone/x", ["alone/x"]),
        ("", "time_step", ["time_step"]),
        ("throughput", "x", ["throughput/x"]),
        ("device", "a", ["device/a"]),
        ("device", "b", ["device/b"]),
    ]


def test_the_axes_are_updates_time_and_epochs():
    write_run("run", noisy(40))
    (run,) = read_runs([Path("run")])
    steps, times, epochs = axes_of([run])
    (series,) = run.metrics.values()
    assert (steps.name, times.name, epochs.name) == ("step", "time", "epoch")
    assert steps.place(run, series).tolist() == list(range(1, 41))
    assert times.label == "time in s"
    assert times.place(run, series) == pytest.approx(np.arange(40) * 0.5)
    assert epochs.place(run, series) == pytest.approx(np.arange(1, 41) / 10)


def test_without_several_epochs_or_times_there_are_no_such_axes():
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text('{"loss": 1}\n{"loss": 2}\n')  # as one's own loop may
    (run,) = read_runs([Path("run")])
    assert [axis.name for axis in axes_of([run])] == ["step"]
    assert run.metrics["loss"].steps.tolist() == [1, 2]


def test_the_scale_is_logarithmic_only_where_values_are_far_apart():
    def of(*values):
        numbers = np.array(values)
        return is_logarithmic(
            [Series(steps=numbers, times=numbers, epochs=numbers, values=numbers)]
        )

    assert of(1e-3, 0.5, 1.0)
    assert not of(1.1e-3, 0.5, 1.0)
    assert not of(0.0, 0.5, 1000.0)
    assert of(1e-3, 0.5, 1.0, np.nan)
    assert not of(np.nan)


# -- several runs ----------------------------------------------------------------------------------


@pytest.fixture
def two():
    for index, lr in enumerate((0.1, 0.2)):
        about = {
            "starts": [start(0, 30, "finished")],
            "configuration": {"seed": 0, "max_epochs": 4},
            "hyper_parameters": {"width": 64, "lr": lr, **({} if index else {"note": ""})},
        }
        write_run(f"{'ab'[index]}/run", noisy(40, seed=index), about=about)
    return ["a/run", "b/run"]


def test_each_run_has_a_colour_and_a_name_everywhere(two):
    html = report(*two)
    names = {}
    for run in html.all("span", "run"):
        color = run.all("i")[0]["style"].removeprefix("background:")
        assert names.setdefault(run.text, color) == color
    assert names == {"a/run": "var(--run-0)", "b/run": "var(--run-1)"}
    for kind in ("raw", "ema-06"):
        lines = lines_of(html, "loss", kind)
        assert ["var(--run-0)" in line["style"] for line in lines] == [True, False]
        assert ["var(--run-1)" in line["style"] for line in lines] == [False, True]
    style = html.all("style")[0].text
    colors = re.findall(r"--run-\d:(#\w+);", style)
    assert len(colors) == len(set(colors)) == 4  # light and dark


def test_what_differs_comes_first(two):
    part = section(report(*two), "Hyper-parameters")
    (differ,) = part.all("table", "differ")
    assert [[cell.text for cell in row] for row in differ.rows()] == [
        ["lr", "hyper-parameter", "0.1", "0.2"],
        ["note", "hyper-parameter", "", "\N{EN DASH}"],  # the other run has none
    ]
    (shared,) = part.all("details")
    assert {row[0].text: row[2].text for row in shared.rows()} == {
        "width": "64",
        "seed": "0",
        "max_epochs": "4",
    }


def test_the_runs_in_a_folder_are_compared_best_first(capsys):
    """As a sweep leaves them: a trial has failed early, and another is measured otherwise."""
    values = {0: 0.5, 1: 0.25, 9: None, 10: 0.125}
    for number, value in values.items():
        about = {
            "starts": [start(0, 30, "finished")],
            "configuration": {"max_epochs": 4},
            "hyper_parameters": {"lr": 10.0**-number, "width": 64},
        }
        folder = f"sweep/2026-01-01/{number}"
        of_run = [] if value is None else [(s, 0, s, {"val/loss": value * s}) for s in (3, 1, 2)]
        write_run(folder, of_run, about=about)
        write_run(f"{folder}/logs/inner", noisy(1))  # belongs to the trial
    html = report("sweep")
    rows = section(html, "Trials").rows()
    assert [[cell.text for cell in row] for row in rows] == [
        ["10", "0.125", "1", "1e-10"],
        ["1", "0.25", "1", "0.1"],
        ["0", "0.5", "1", "1.0"],
        ["9", "\N{EN DASH}", "\N{EN DASH}", "1e-09"],
    ]
    assert [row[0].text for row in section(html, "Runs").rows()] == ["0", "1", "9", "10"]
    assert capsys.readouterr().out.splitlines()[:3] == [
        "run  min val/loss  lr",
        "10   0.125         1e-10",
        "1    0.25          0.1",
    ]
    assert "Trials" not in titles(report("sweep/2026-01-01/0"))


def test_values_of_runs_stand_below_each_other(two):
    rows = section(report(*two), "Values").rows()
    assert [[row[0].text, row[1].text] for row in rows] == [
        ["train/loss", "a/run"],
        ["train/loss", "b/run"],
    ]
    for row, folder in zip(rows, two, strict=True):
        last = read_metrics(f"{folder}/metrics.jsonl")[-1]
        assert data_of(row[2]) == repr(last["train/loss"])


# -- how runs ended --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("starts", "status", "seconds"),
    [
        ([start(0, 25, "failed")], "failed", 25),
        ([start(0)], "killed", 20),
        ([start(0), start(100, 130, "finished", 20)], "finished", 20 + 30),
        ([start(0, 21, "preempted"), start(100)], "killed", 21),
    ],
)
def test_the_status_and_the_time_it_ran(starts, status, seconds):
    write_run("run", noisy(40), about={"starts": starts})
    (run,) = read_runs([Path("run")])
    assert run.status == status
    assert run.seconds == pytest.approx(seconds)
    assert section(report("run"), "Runs").all("b", "status")[0].text == status


def test_without_run_json_the_record_says_what_it_can():
    write_run("run", noisy(40))
    (run,) = read_runs([Path("run")])
    assert (run.status, run.updates, run.epochs) == ("not running", 40, 4)
    assert run.seconds == pytest.approx(19.5)
    assert run.record.speed() == pytest.approx(2.0)
    assert run.began == BEGAN + 0.5


def test_a_run_that_is_under_way_is_running():
    write_run("run", noisy(4), about={"starts": [start(0)]})
    with alone_in(Path("run")):
        html = report("run")
    assert section(html, "Runs").all("b", "status")[0].text == "running"
    assert "Warnings and events" not in titles(html)


def test_events_are_listed():
    skipped = [(10, 0), (20, 1), (30, 1), (40, 3)]
    write_run(
        "run",
        [
            (step, 0, step, {"skipped_updates": float(n)} if n else {"x": 1.0})
            for step, n in skipped
        ],
        about={
            "starts": [
                start(0),
                start(50, 60, "preempted", 20),
                start(70, 80, "failed", 30, "FloatingPointError: NaN at 41"),
            ],
            "warnings": [{"time": BEGAN, "logger": "trainer.due", "text": "no validation"}],
            "more_warnings": 3,
        },
    )
    lines = section(report("run"), "Warnings and events").all("li")
    shown = [(each.all("b")[0].text, each.all("span")[0].text) for each in lines]
    assert shown == [
        ("killed", "ended without a message: the process was killed, or the machine failed"),
        ("start", "start 2, after update 20"),
        ("preempted", "ended by a signal"),
        ("start", "start 3, after update 30"),
        ("failed", "FloatingPointError: NaN at 41"),
        ("warning", "no validation (trainer.due)"),
        ("warning", "3 more warnings, which were not kept"),
        ("skipped", "3 updates skipped, noticed at update 20, 40"),
    ]


# -- what cannot be read ---------------------------------------------------------------------------


def test_a_torn_last_line_is_left_out_with_a_warning():
    write_run("run", noisy(3), torn='{"step": 4, "epo')
    html = report("run")
    assert "line of metrics.jsonl is incomplete" in section(html, "Warnings and events").text
    assert data_of(section(html, "Values").rows()[0][2]) == "3"


def test_lines_that_are_no_records_are_a_warning():
    folder = write_run("run", noisy(3))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('garbage\n[1]\n{"step": 9, "train/loss": 7.5, "text": "hello"}\n')
    html = report("run")
    events = section(html, "Warnings and events").text
    assert "2 lines are no records: 4, 5. metrics.jsonl, line 4 is not JSON" in events
    assert "not numbers, left out here: text" in events
    assert data_of(section(html, "Values").rows()[0][1]) == "7.5"


def append(folder, *records):
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(f"{json.dumps(each)}\n" for each in records)


def test_a_run_without_a_record_yet_has_a_page():
    write_run("run", [], about={"starts": [start(0)]})
    html = report("run")
    assert "There are no metrics yet." in html.text
    assert html.all("figure", "chart") == []


def test_an_unreadable_run_json_is_a_warning():
    folder = write_run("run", noisy(3))
    for broken in ("{", '{"starts": [{}]}', '{"starts": [], "warnings": null}'):
        (folder / "run.json").write_text(broken)
        html = report("run")
        assert "run.json cannot be read" in section(html, "Warnings and events").text
        assert len(section(html, "Values").rows()) == 1


def test_checkpoints_alone_make_a_page(fitted, tmp_path):
    import shutil

    shutil.copytree(fitted / "checkpoints", tmp_path / "only/checkpoints")
    newest = max((tmp_path / "only/checkpoints").iterdir())
    (newest / "model.safetensors").write_bytes(b"")
    html = report("only")
    rows = section(html, "Checkpoints").rows()
    assert [row[5].text for row in rows][-1] == "damaged"
    assert "last" not in rows[-1][1].text
    assert "model.safetensors is damaged" in section(html, "Warnings and events").text
    shown = {row[0].text: row[2].text for row in section(html, "Hyper-parameters").rows()}
    assert shown["width"] == "3"
    assert shown["max_epochs"] == "6"
    (row,) = section(html, "Runs").rows()
    assert "not running" in [cell.text for cell in row]


def test_images_without_tensorboard_are_a_warning(fitted, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    html = report(fitted)
    assert "Images" not in titles(html)
    assert "cadence-trainer[tensorboard]" in section(html, "Warnings and events").text


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("empty", "empty is not the folder of a run: it has neither metrics.jsonl"),
        ("runs", "runs is not the folder of a run: it has neither metrics.jsonl"),
        ("file", "is a file"),
        ("none", "does not exist"),
        ("other/first --output empty", "--output empty is a folder"),
    ],
)
def test_wrong_usage_is_refused(capsys, words, text):
    Path("empty").mkdir()
    Path("file").touch()
    write_run("runs/.first", noisy(1))  # hidden
    write_run("other/first", noisy(1))
    assert main(["report", *words.split()]) == 1
    assert text in capsys.readouterr().err
    assert not Path("report.html").exists()


def test_the_output_is_replaced_and_its_folder_made(capsys):
    write_run("run", noisy(3))
    for _ in range(2):
        report("run", output="deep/er/page.html")
    assert [path.name for path in Path("deep/er").iterdir()] == ["page.html"]
    assert re.search(r"deep/er/page\.html \(\d+(\.\d+)? kB\)\n", capsys.readouterr().out)


def test_a_record_alone_is_a_run():
    record = write_run("run", noisy(30)) / "metrics.jsonl"
    record.rename("own.jsonl")
    html = report("own.jsonl")
    assert html.all("h1")[0].text == "own.jsonl"
    assert data_of(section(html, "Values").rows()[0][5]) is not None


def test_runs_of_one_name_are_named_by_their_paths():
    folders = [write_run(name, noisy(1)) for name in ("x/a/run", "y/a/run", "y/b")]
    assert [run.name for run in read_runs(folders[1:])] == ["run", "b"]
    names = [run.name for run in read_runs(folders)]
    assert names[:2] == ["x/a/run", "y/a/run"]
    assert names[2].endswith("y/b")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="os.mkfifo is needed")
@pytest.mark.parametrize("command", [["report", "run"], ["watch", "run", "--once"]])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_record_that_is_no_regular_file_is_not_read(command, kind, capsys):
    Path("run").mkdir()
    if kind == "pipe":
        os.mkfifo("run/metrics.jsonl")
    else:
        Path("run/metrics.jsonl").symlink_to("/dev/zero")
    assert main(command) == 1
    assert "run/metrics.jsonl" in capsys.readouterr().err
