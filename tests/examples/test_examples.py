"""Every example runs with warnings as errors, on one process and on two."""

from __future__ import annotations

import ast
import csv
import gzip
import importlib.util
import inspect
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy
import psutil
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.programs import run_command, run_on_ranks, run_script
from tests.helpers.requires import requires_pipelining
from tests.helpers.services import comet_runs, wandb_runs
from trackers import read_metrics
from trainer import Accelerator

matplotlib = pytest.importorskip("matplotlib")
load_digits = pytest.importorskip("sklearn.datasets").load_digits

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Errors, but for those of torchao 0.16, which fits torch 2.9, when it is imported.
WARNINGS = "error,ignore:Importing :DeprecationWarning"
DIGITS_FOR_VALIDATION = 359


@pytest.fixture
def run(ranks):
    """Runs an example in the working folder, on ranks if on several; returns what it printed."""

    def on_processes(name: str, *arguments: object, processes: int = 1) -> str:
        path = str(EXAMPLES / name)
        if processes == 1:
            return run_script(path, *arguments)
        return run_on_ranks(ranks(processes), path, *arguments)

    return on_processes


def run_apart(*arguments: object) -> str:
    """Run an example in a process of its own; return what it printed."""
    started = subprocess.run(
        [sys.executable, str(EXAMPLES / str(arguments[0])), *map(str, arguments[1:])],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": WARNINGS, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert started.returncode == 0, f"{started.stdout}\n{started.stderr}"
    return started.stdout


def load_example(name: str) -> ModuleType:
    """An example as a module, for its functions."""
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / name)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def results(output: str) -> list[str]:
    """The lines that a script prints, without those of the Trainer on what it starts from."""
    return re.sub(
        r"^(No checkpoint in|Resuming from|Nothing is left to do:) .*\n", "", output, flags=re.M
    ).splitlines()


def printed(output: str, name: str) -> str:
    """The rest of the line that begins with `name`."""
    (value,) = re.findall(rf"^{name}\s+(.*)$", output, re.MULTILINE)
    return value


def series(project_dir: Path, name: str) -> list[float]:
    """Every recorded value of a metric, of the fit and of the evaluations behind it."""
    files = [project_dir / "metrics.jsonl", project_dir / "evaluations.jsonl"]
    records = [record for file in files if file.exists() for record in read_metrics(file)]
    return [record[name] for record in records if name in record]


def test_the_index_lists_every_example_with_its_command():
    page = (EXAMPLES / "README.md").read_text()
    commands = re.findall(r"^\| `[^`]*examples/(\w+\.py)`", page, re.MULTILINE)
    assert sorted(commands) == sorted(path.name for path in EXAMPLES.glob("*.py"))


# -- digits ----------------------------------------------------------------------------------------


def test_digits_reaches_its_accuracy_and_a_second_start_adds_nothing(run, tmp_path):
    output = run("digits.py", "--project-dir", "runs/digits")
    final, best = re.findall(r"0\.\d{4}", printed(output, "accuracy"))
    assert float(final) > 0.96
    assert float(best) > 0.96

    checkpoint = tmp_path / printed(output, "checkpoint")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert f"{manifest['metrics']['val/accuracy']:.4f}" == best
    accuracies = series(tmp_path / "runs/digits", "val/accuracy")
    assert f"{accuracies[-1]:.4f}" == final
    assert f"{max(accuracies):.4f}" == best
    logs = tmp_path / printed(output, "curves").removeprefix("tensorboard --logdir ")
    assert list(logs.rglob("events.out.tfevents.*"))

    again = run("digits.py", "--project-dir", "runs/digits")
    assert again.startswith(f"Resuming from {tmp_path}/runs/digits/checkpoints/step-")
    assert results(again) == results(output)
    assert series(tmp_path / "runs/digits", "val/accuracy") == accuracies


def test_digits_is_the_same_run_on_two_processes(run, tmp_path):
    run("digits.py", "--project-dir", "one", "--max-epochs", 4, "--batch-size", 32)
    run("digits.py", "--project-dir", "two", "--max-epochs", 4, "--batch-size", 16, processes=2)
    one, two = tmp_path / "one", tmp_path / "two"
    assert series(two, "val/accuracy") == pytest.approx(series(one, "val/accuracy"), abs=1e-7)
    assert series(two, "train/loss") == pytest.approx(series(one, "train/loss"), rel=1e-3)
    assert len(series(two, "val/accuracy")) == 4


# -- transfer learning -----------------------------------------------------------------------------


def test_transfer_learning_unfreezes_and_a_second_start_adds_nothing(run, tmp_path):
    output = run("transfer_learning.py", "--project-dir", "runs/transfer")
    accuracies = {name: float(printed(output, name)) for name in ("first", "transfer", "scratch")}
    assert accuracies["first"] > 0.98
    assert accuracies["transfer"] > 0.85

    folder = tmp_path / "runs/transfer/transfer"
    rates = series(folder, "lr-AdamW/pg2")
    assert len(rates) == len(series(folder, "lr-AdamW/pg1")) > 0
    assert (rates[0], rates[-1]) == (pytest.approx(2e-4), pytest.approx(2e-3))
    assert not series(tmp_path / "runs/transfer/scratch", "lr-AdamW/pg2")

    again = run("transfer_learning.py", "--project-dir", "runs/transfer")
    assert results(again) == results(output)


# -- own loop --------------------------------------------------------------------------------------


def test_a_model_larger_than_memory_gives_the_same_outputs(run, tmp_path):
    output = run("larger_than_memory.py", "--depth", 6, "--memory", 60, "--folder", tmp_path)
    assert "2 layers in memory, 4 on disk" in output
    assert "outputs equal: True" in output


def test_own_loop_has_the_same_accuracy_on_two_processes(run):
    one = run("own_loop.py", "--max-epochs", 6, "--batch-size", 16)
    two = run("own_loop.py", "--max-epochs", 6, "--batch-size", 8, processes=2)
    assert two == one
    accuracies = [float(value) for value in re.findall(r"accuracy (\S+)", one)]
    assert len(accuracies) == 6
    assert accuracies[-1] > 0.9
    for accuracy in accuracies:  # a share of the samples there are: none counted twice
        correct = round(accuracy * DIGITS_FOR_VALIDATION)
        assert accuracy == round(correct / DIGITS_FOR_VALIDATION, 4)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_typed_program_trains(run, processes):
    epochs, last = results(run("typed.py", "--max-epochs", 4, processes=processes))
    losses = ast.literal_eval(epochs.removeprefix("epoch losses "))
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 4
    assert float(last.rpartition(" ")[2]) < 1


# -- all trackers ----------------------------------------------------------------------------------


def test_all_trackers_have_the_same_run_offline_and_nothing_is_left_elsewhere(
    tmp_path, monkeypatch
):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("MPLCONFIGDIR", matplotlib.get_cachedir())  # it need not look for fonts
    monkeypatch.setenv("HOME", str(home))
    output = run_apart("all_trackers.py", "--project-dir", "runs/all", "--max-epochs", 2)
    folder = tmp_path / "runs/all"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "runs"]
    assert list(tmp_path.joinpath("runs").iterdir()) == [folder]
    assert not list(home.rglob("*"))

    losses = series(folder, "train/loss")
    assert len(losses) == 18
    accuracy = series(folder, "val/accuracy")[-1]
    assert printed(output, "accuracy") == f"{accuracy:.4f}"
    with open(tmp_path / printed(output, "csv"), newline="") as table:
        rows = list(csv.DictReader(table))
    assert [float(row["train/loss"]) for row in rows if row["train/loss"]] == losses

    logs = tmp_path / printed(output, "tensorboard").removeprefix("tensorboard --logdir ")
    events = EventAccumulator(str(logs / "all")).Reload()
    tags = events.Tags()
    assert [each.value for each in events.Scalars("train/loss")] == pytest.approx(losses)
    assert set(tags["images"]) == {"confusion/figure", "misread"}
    assert tags["histograms"] == ["weights/first"]
    assert "confusion/text_summary" in tags["tensors"]

    (at_wandb,) = wandb_runs(folder / "wandb")
    assert [value for _, value in at_wandb.series("train/loss")] == pytest.approx(losses)
    assert (at_wandb.summary["status"], at_wandb.exit_code) == ("finished", 0)
    assert at_wandb.config["lr"] == 2e-3
    kinds = Counter(artifact.type for artifact in at_wandb.artifacts)
    assert kinds["model"] == 1
    (at_comet,) = comet_runs(folder / "comet")
    assert [value for _, value in at_comet.metrics["train/loss"]] == pytest.approx(losses)
    assert at_comet.others["status"] == "finished"
    names = " ".join(str(upload) for upload in at_comet.uploads)
    assert all(name in names for name in ("misread", "confusion.csv", "model.safetensors"))

    lines = (tmp_path / printed(output, "diary")).read_text().splitlines()
    assert lines[0] == "# all"
    assert lines[-1] == "The run has finished."
    assert f"- step 90: val/accuracy **{accuracy:.4g}**" in lines
    (misread,) = re.findall(r"- step 90: summary: (\d+) of 359 misread", "\n".join(lines))
    assert int(misread) == round((1 - accuracy) * DIGITS_FOR_VALIDATION)


# -- every member ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("processes", "batch_size"), [(1, 16), (2, 8)])
def test_every_member_of_the_accelerator_is_used_at_work(run, tmp_path, processes, batch_size):
    options = ("--max-epochs", 4, "--batch-size", batch_size)
    output = run("every_member.py", *options, processes=processes)
    assert printed(output, "processes") == str(processes)
    assert float(printed(output, "accuracy")) > 0.93
    project = tmp_path / "runs/every-member"
    numbered = sorted(path.name for path in (project / "checkpoints").iterdir())
    assert numbered == ["checkpoint_2", "checkpoint_3"]  # of four, as many as are kept
    assert list((project / "digits").glob("events.out.tfevents.*"))


def test_every_member_may_run_again_in_the_same_folder(run, tmp_path):
    options = ("--max-epochs", 3, "--batch-size", 64)
    run("every_member.py", *options, processes=1)
    output = run("every_member.py", *options, processes=1)
    assert printed(output, "earlier run") == "numbers continue from 3"
    numbered = (tmp_path / "runs/every-member/checkpoints").iterdir()
    assert sorted(path.name for path in numbered) == ["checkpoint_4", "checkpoint_5"]


def test_predictions_in_files_are_in_the_order_of_the_dataset_on_any_number_of_processes(
    run, tmp_path
):
    found = []
    for processes, batch_size in ((1, 32), (2, 16)):
        project = f"runs/{processes}"
        options = ("--project-dir", project, "--batch-size", batch_size)
        output = run("predict_to_files.py", *options, processes=processes)
        folder = tmp_path / project / "predictions"
        assert printed(output, "files") == str(folder)
        lines = (folder / "predictions.jsonl").read_text().splitlines()
        words = [json.loads(line)["word"] for line in lines]
        assert printed(output, "first") == ", ".join(words[:5])
        found.append((load_file(folder / "predictions.safetensors"), words))
        assert sorted(path.name for path in folder.iterdir()) == [
            "predictions.jsonl",
            "predictions.safetensors",
        ]
        digits = torch.tensor(load_digits(return_X_y=True)[1])
        accuracy = (found[-1][0]["digit"] == digits).float().mean().item()
        assert accuracy > 0.95
        assert printed(output, "accuracy") == f"{accuracy:.4f}"
    # the same updates, so the same model but for the order of sums
    (one, words), (two, others) = found
    torch.testing.assert_close(one["probabilities"], two["probabilities"], rtol=0, atol=0.02)
    assert sum(a != b for a, b in zip(words, others, strict=True)) < 10


def test_every_member_leaves_no_method_out():
    tree = ast.parse((EXAMPLES / "every_member.py").read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    methods = {name for name, _ in inspect.getmembers(Accelerator, inspect.isfunction)}
    documented = {name for name in methods if not name.startswith("_")} - {
        # of ours alone: the documented API has the first two as methods of trackers
        *("log_images", "log_table", "log_histogram", "log_figure", "log_text"),
        *("log_artifact", "log_model"),
    }
    assert documented - used == set()


# -- GAN -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("processes", "batch_size"), [(1, 64), (2, 32)])
def test_gan_generates_what_looks_like_digits(run, tmp_path, processes, batch_size):
    output = run("gan.py", "--max-epochs", 15, "--batch-size", batch_size, processes=processes)
    for name in ("generator", "discriminator"):
        values = series(tmp_path / "runs/gan", f"loss/{name}")
        assert len(values) > 10
        assert numpy.isfinite(values).all()
        assert float(printed(output, name)) == pytest.approx(values[-1], abs=1e-4)

    header, pixels = (tmp_path / printed(output, "samples")).read_bytes().split(b"\n", 1)
    assert header == b"P5 80 80 255"
    grid = numpy.frombuffer(pixels, dtype=numpy.uint8).reshape(8, 10, 8, 10)
    samples = grid.swapaxes(1, 2)[:, :, 1:9, 1:9].reshape(64, 64)
    real = load_digits(return_X_y=True)[0]
    # Untrained, the mean sample has nothing to do with the mean digit.
    assert numpy.corrcoef(samples.mean(0), real.mean(0))[0, 1] > 0.8
    assert samples.std(0).mean() > 10  # and they are not all the same


# -- Fashion-MNIST ---------------------------------------------------------------------------------


def write_idx(path: Path, array: numpy.ndarray) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    content = bytes([0, 0, 8, array.ndim]) + sizes + array.astype(numpy.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_data(folder: Path, suffix: str) -> None:
    """Ten kinds of images that differ in the rows that are bright."""
    folder.mkdir()
    random = numpy.random.default_rng(0)
    for part, size in (("train", 480), ("t10k", 70)):
        labels = numpy.arange(size) % 10
        images = random.integers(0, 100, (size, 28, 28))
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 4] += 150
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", labels)


def test_fashion_mnist_learns_from_compressed_and_plain_files(run, tmp_path):
    outputs = []
    for suffix in ("", ".gz"):
        name = f"data{suffix}"
        write_data(tmp_path / name, suffix)
        options = ("--data-dir", name, "--project-dir", f"runs/{name}", "--batch-size", 16)
        outputs.append(printed(run("fashion_mnist.py", *options), "test accuracy"))
    assert outputs[0] == outputs[1]
    assert float(outputs[0]) > 0.95
    assert series(tmp_path / "runs/data", "test/accuracy") == pytest.approx(
        [float(outputs[0])], abs=1e-4
    )


def test_fashion_mnist_says_where_missing_files_are_to_be_had(run, tmp_path):
    write_data(tmp_path / "data", "")
    (tmp_path / "data" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(SystemExit) as ended:
        run("fashion_mnist.py", "--data-dir", "data")
    errors = str(ended.value.code)  # which Python prints, and ends with 1
    assert errors.startswith("data lacks t10k-labels-idx1-ubyte (")
    assert "apt install dataset-fashion-mnist" in errors
    assert "--data-dir" in errors
    assert "Traceback" not in errors


# -- cross-validation ------------------------------------------------------------------------------

KILL_AT_A_SAVE = """
import os, runpy, signal, sys

saves = 0

def kill(event, arguments):
    global saves
    if event == "os.rename" and "fold-2/checkpoints/step-" in str(arguments[1]):
        saves += 1
        if saves == 3:  # the third is not there yet
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def folds(project_dir: Path) -> list[dict[str, object]]:
    """All that the folds left: the final weights, and the metrics without the times."""
    left = []
    for folder in sorted(project_dir.iterdir()):
        records = list(read_metrics(folder / "metrics.jsonl"))
        newest = max((folder / "checkpoints").iterdir())
        weights = load_file(newest / "model.safetensors")
        left.append(
            {
                "metrics": [{k: v for k, v in record.items() if k != "time"} for record in records],
                "weights": {name: tensor.tolist() for name, tensor in weights.items()},
            }
        )
    return left


def test_cross_validation_goes_on_in_the_fold_that_was_killed(run, tmp_path):
    options = ("cross_validation.py", "--folds", 3, "--max-epochs", 4, "--batch-size", 64)
    output = run(*options, "--project-dir", "whole")
    accuracies = [float(value) for value in re.findall(r"^fold-\d  (\S+)$", output, re.MULTILINE)]
    assert len(set(accuracies)) == 3  # each fold has images of its own to judge it
    mean, deviation = map(float, re.findall(r"0\.\d{4}", printed(output, "accuracy")))
    assert mean == pytest.approx(numpy.mean(accuracies), abs=1e-4)
    assert deviation == pytest.approx(numpy.std(accuracies, ddof=1), abs=1e-4)
    assert mean > 0.8
    for accuracy in accuracies:  # a share of a third of the images, to what is printed
        assert accuracy * 599 == pytest.approx(round(accuracy * 599), abs=0.031)

    command = [str(EXAMPLES / options[0]), *map(str, options[1:]), "--project-dir", "killed"]
    killed = subprocess.run(
        [sys.executable, "-c", KILL_AT_A_SAVE, *command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": WARNINGS, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    first = tmp_path / "killed/fold-1"
    done = {path: path.stat().st_mtime_ns for path in first.rglob("*.safetensors")}
    again = run(*options, "--project-dir", "killed")
    gone_on_from = re.findall(
        r"^Resuming from \S+/killed/(\S+)/checkpoints/(\S+)", again, re.MULTILINE
    )
    assert gone_on_from == [("fold-1", "step-00000076"), ("fold-2", "step-00000038")]
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*.safetensors")} == done
    assert folds(tmp_path / "killed") == folds(tmp_path / "whole")
    assert results(again) == results(output)


# -- language model --------------------------------------------------------------------------------


def entropy(counts: Counter[str]) -> float:
    """Bits, of the shares that the counts are of all."""
    total = counts.total()
    return -sum(n / total * math.log2(n / total) for n in counts.values())


def bits_of(output: str) -> dict[str, float]:
    names = ("unigram", "bigram", "untrained", "trained")
    return {name: float(printed(output, name).split()[0]) for name in names}


def test_language_model_trains_on_the_texts_of_a_few_modules(run, tmp_path, monkeypatch):
    few = frozenset(sorted(sys.stdlib_module_names)[::6])
    monkeypatch.setattr(sys, "stdlib_module_names", few)
    options = ("--max-steps", 4, "--batch-size", 4, "--accumulation", 1)
    output = run("language_model.py", *options, "--project-dir", "runs/lm")
    bits = bits_of(output)
    _, val = load_example("language_model.py").load_texts()
    least = entropy(Counter("".join(f"{text}\0" for text in val)))
    assert least - 0.01 < bits["unigram"] < least + 0.5
    assert bits["bigram"] < bits["unigram"]
    assert bits["trained"] < bits["untrained"] - 0.2
    newest = max((tmp_path / "runs/lm/checkpoints").iterdir())
    averages, weights = (load_file(newest / f"{n}.safetensors") for n in ("model", "trained"))
    assert not torch.equal(averages["positions.weight"], weights["positions.weight"])
    assert output.count("-" * 80) == 3


@pytest.mark.long
@pytest.mark.timeout(900)  # a minute and a half, on a machine that may be busy with others
def test_language_model_learns_more_than_frequencies(run, tmp_path):
    options = ("--max-steps", 32, "--batch-size", 16, "--project-dir", "runs/lm")
    output = run("language_model.py", *options)
    bits = bits_of(output)
    _, val = load_example("language_model.py").load_texts()
    # The frequencies of the text itself cost least, those of other text a little more.
    least = entropy(Counter("".join(f"{text}\0" for text in val)))
    assert least - 0.01 < bits["unigram"] < least + 0.2
    assert bits["bigram"] < bits["unigram"] - 0.5
    assert bits["trained"] < least - 0.1
    assert bits["untrained"] > 6.5

    folder = tmp_path / "runs/lm"
    # Recorded at update 20, half way from 8, where the warm-up ends, to 32.
    assert series(folder, "lr-AdamW") == [pytest.approx(3e-3 / 2)]
    losses = series(folder, "val/loss")
    assert f"{losses[-1] / math.log(2):.3f}" == f"{bits['trained']:.3f}"
    newest = max((folder / "checkpoints").iterdir())
    averages, weights = (load_file(newest / f"{n}.safetensors") for n in ("model", "trained"))
    assert not torch.equal(averages["positions.weight"], weights["positions.weight"])
    assert output.count("-" * 80) == 3


# -- large models ----------------------------------------------------------------------------------


def launch_and_kill(*arguments: object, kill_at: Path) -> None:
    """Run an example under `trainer launch` on two processes; kill all once a path is there."""
    command = (*("-m", "trainer", "launch", "--cpu", "--num_processes", "2"), *map(str, arguments))
    started = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a hanging one ends with its children
        env={**os.environ, "PYTHONWARNINGS": WARNINGS, "OMP_NUM_THREADS": "1"},
    )
    try:
        while started.poll() is None and not kill_at.exists():
            time.sleep(0.01)
        launcher = psutil.Process(started.pid)
        for process in (*launcher.children(recursive=True), launcher):
            process.kill()
        output, errors = started.communicate(timeout=400)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.communicate()
    assert started.returncode == -signal.SIGKILL, f"{output}\n{errors}"


@pytest.fixture
def launch(ranks):
    """Runs an example as `trainer launch` does, with options of it."""

    def launched(
        name: str, *arguments: object, processes: int, options: tuple[str, ...] = ()
    ) -> str:
        words = ("trainer", "launch", "--cpu", "--num_processes", processes, *options)
        words += (EXAMPLES / name, *arguments)
        return run_command(ranks, [str(word) for word in words])

    return launched


@pytest.mark.timeout(900)  # a minute, on a machine that may be busy with others
def test_large_language_model_is_killed_resumed_merged_and_used_in_plain_pytorch(
    ranks, run, launch, tmp_path
):
    name, outputs = "large_language_model.py", {}
    options = ("--max-steps", 24, "--save-every", 8, "--project-dir")
    killed = tmp_path / "killed/checkpoints/step-00000008"
    launch_and_kill(EXAMPLES / name, *options, "killed", "--batch-size", 8, kill_at=killed)
    for folder, processes in (("one", 1), ("killed", 2)):
        batch_size = ("--batch-size", 16 // processes)
        outputs[folder] = launch(name, *options, folder, *batch_size, processes=processes)
    assert outputs["killed"].startswith(f"Resuming from {tmp_path}/killed/checkpoints/step-0000")
    losses = {folder: series(tmp_path / folder, "val/loss") for folder in outputs}
    assert len(losses["one"]) == 4  # three of the fit, one of the end
    assert losses["killed"] == pytest.approx(losses["one"], rel=1e-4)
    assert losses["one"][2] < losses["one"][0] - 0.1
    whole, here = re.findall(r"\d+,\d+", printed(outputs["killed"], "parameters"))
    assert int(here.replace(",", "")) == int(whole.replace(",", "")) / 2

    merge, generate = (
        shlex.split(printed(outputs["killed"], each)) for each in ("merge", "generate")
    )
    run_command(ranks, merge)
    assert len(run(name, *generate[2:])) > 200  # what was generated, after the prompt


# peft uses a name that transformers has replaced, and DeepSpeed imports inductor.
OF_LIBRARIES = ("ignore::FutureWarning", "ignore::DeprecationWarning:torch.jit._script")
ZERO = ("--use_deepspeed", "--zero_stage", "3", "--offload_optimizer_device", "cpu")


@pytest.mark.timeout(900)  # a minute, on a machine that may be busy with others
@pytest.mark.filterwarnings(*OF_LIBRARIES)
def test_zero_trains_by_deepspeed_as_on_one_process_and_plain_pytorch_reads_it(launch, tmp_path):
    def run_zero(processes: int, *options: str) -> str:
        words = ("--max-epochs", 2, "--batch-size", 32 // processes, "--project-dir", processes)
        return launch("zero.py", *words, processes=processes, options=options)

    one, two = run_zero(1), run_zero(2, *ZERO)
    assert (printed(one, "trained by"), printed(two, "trained by")) == ("NO", "DEEPSPEED")
    for output in (one, two):
        assert printed(output, "plain").split()[0] == printed(output, "accuracy")
    for name in ("train/loss", "grad_norm", "val/accuracy"):
        found = series(tmp_path / "2", name)
        assert found == pytest.approx(series(tmp_path / "1", name), abs=5e-3)
    assert float(printed(two, "accuracy")) > 0.8


@pytest.mark.timeout(900)  # a minute, on a machine that may be busy with others
@pytest.mark.filterwarnings(*OF_LIBRARIES)
def test_finetune_lora_adapts_to_code_alike_on_two_processes(launch, tmp_path):
    found = []
    for processes in (1, 2):
        options = ("--max-steps", 40, "--batch-size", 16 // processes, "--project-dir", processes)
        output = launch("finetune_lora.py", *options, processes=processes)
        found.append([float(printed(output, name).split()[0]) for name in ("base", "adapted")])
        adapters = load_file(tmp_path / printed(output, "adapters") / "adapter_model.safetensors")
        trained = printed(output, "trained").split()[0].replace(",", "")
        assert sum(value.numel() for value in adapters.values()) == int(trained)
    assert found[1] == pytest.approx(found[0], abs=2e-3)
    assert found[0][1] < found[0][0] - 0.1


# -- fp8 and pipelines -----------------------------------------------------------------------------


def test_fp8_is_near_bf16_on_shards(run):
    pytest.importorskip("torchao")
    output = run("fp8.py", "--max-epochs", 2, "--batch-size", 16, "--fsdp", processes=2)
    (bf16, of_bf16), (fp8, of_fp8) = (
        printed(output, name).removeprefix("loss ").split("  layers ") for name in ("bf16", "fp8")
    )
    assert of_bf16.split() == ["Linear"] * 4
    assert of_fp8.split() == ["Linear", "Float8Linear", "Float8Linear", "Linear"]
    assert float(fp8.split()[0]) == pytest.approx(float(bf16.split()[0]), abs=0.05)


@requires_pipelining
def test_a_pipeline_trains_alike_on_two_processes(run):
    one = run("pipeline.py", "--max-epochs", 2)
    two = run("pipeline.py", "--max-epochs", 2, processes=2)
    assert printed(one, "files") == "model.safetensors"
    assert len(printed(two, "files").split()) == 2
    losses = [re.findall(r"loss (\S+)", output) for output in (one, two)]
    assert [float(x) for x in losses[1]] == pytest.approx([float(x) for x in losses[0]], abs=1e-4)
    assert float(printed(two, "accuracy")) == float(printed(one, "accuracy")) > 0.8
