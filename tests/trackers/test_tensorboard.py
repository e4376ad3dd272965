import contextlib
import io
import itertools
import math
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as PageAccumulator,
)
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import (
    api_pb2,
    backend_context,
    list_session_groups,
    plugin_data_pb2,
)
from tensorboard.util import tensor_util

from trackers import TensorBoardTracker, resolve_trackers


@pytest.fixture
def tracker(tmp_path):
    tracker = TensorBoardTracker("run", tmp_path)
    tracker.start()
    yield tracker
    tracker.finish()


def read(tracker):
    events = EventAccumulator(str(tracker.log_dir))
    events.Reload()
    return events


def scalars(events, name):
    return [(event.step, event.value) for event in events.Scalars(name)]


def text(events, name):
    (event,) = events.Tensors(f"{name}/text_summary")
    return event.tensor_proto.string_val[0].decode()


def test_scalars_of_every_kind_can_be_read_before_the_end(tracker):
    tracker.log({"first": 2.0})
    tracker.log({"loss": 0.5, "int": 3, "flag": True}, 1)
    tracker.log({"loss": torch.tensor([0.25]), "int": np.int64(4), "note": "a text"}, 2)
    tracker.log({"parts": {"a": 1.5, "b": {"c": 2}}}, 3)
    events = read(tracker)
    assert scalars(events, "first") == [(0, 2.0)]
    assert scalars(events, "loss") == [(1, 0.5), (2, 0.25)]
    assert scalars(events, "int") == [(1, 3), (2, 4)]
    assert scalars(events, "flag") == [(1, 1)]
    assert scalars(events, "parts/a") == [(3, 1.5)]
    assert scalars(events, "parts/b/c") == [(3, 2)]
    assert text(events, "note") == "a text"


def test_keyword_arguments_reach_the_writer(tracker):
    tracker.log({"loss": 1.0, "other": 2.0}, 1, walltime=123.0)
    tracker.log({"exact": 0.1, "other": 0.2}, 2, new_style=True, double_precision=True)
    events = read(tracker)
    assert events.Scalars("loss")[0].wall_time == events.Scalars("other")[0].wall_time == 123.0
    assert events.Tensors("exact")[0].tensor_proto.double_val == [0.1]


def test_a_value_of_another_kind_is_named_and_the_others_are_recorded(tracker):
    with pytest.raises(TypeError, match=r"bad \(Tensor\), in/worse \(NoneType\)"):
        tracker.log({"bad": torch.zeros(2), "in": {"worse": None}, "loss": 1.0}, 1)
    assert scalars(read(tracker), "loss") == [(1, 1.0)]


def test_configuration(tracker):
    values = {
        "lr": 0.1,
        "bias": False,
        "model": {"layers": 2, "shape": (3, 4), "path": Path("x")},
        "none": None,
        "dtype": torch.float32,
        "numpy": np.float64(2.0),
    }
    tracker.store_init_configuration(values)
    events = read(tracker)
    written = text(events, "configuration").removeprefix("```yaml\n").removesuffix("```")
    assert yaml.safe_load(written) == {
        "lr": 0.1,
        "bias": False,
        "model": {"layers": 2, "shape": [3, 4], "path": "x"},
        "none": None,
        "dtype": "torch.float32",
        "numpy": 2.0,
    }
    metadata = events.SummaryMetadata("_hparams_/session_start_info")
    stored = plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content)
    hparams = stored.session_start_info.hparams
    assert hparams["lr"].number_value == 0.1
    assert hparams["model.layers"].number_value == 2
    assert hparams["model.shape"].string_value == "[3, 4]"
    assert hparams["none"].string_value == "None"
    # no folder beside the event file for TensorBoard to take for another run
    assert not [path for path in tracker.log_dir.iterdir() if path.is_dir()]


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_images(tracker, kind):
    tracker.log_images(
        {
            "gray": kind(np.zeros((4, 5), dtype=np.uint8)),
            "one": kind(np.zeros((3, 4, 6), dtype=np.uint8)),
            "batch": kind(np.zeros((2, 3, 4, 7), dtype=np.uint8)),
        },
        5,
    )
    tracker.log_images({"last": kind(np.zeros((4, 8, 3), np.uint8))}, 6, dataformats="HWC")
    events = read(tracker)
    for name, step, width in [("gray", 5, 5), ("one", 5, 6), ("batch", 5, 14), ("last", 6, 8)]:
        (event,) = events.Images(name)
        assert (event.step, event.width, event.height) == (step, width, 4)


def test_masks_integers_and_floats_are_shown_as_they_are(tracker):
    shown = {
        "mask": (torch.tensor([[True, False]]), [255, 0]),
        "integers": (torch.tensor([[7, 255]]), [7, 255]),
        "classes": (torch.tensor([[1, 0]]), [1, 0]),  # as in a mask with a class 2
        "small classes": (torch.tensor([[1, 0]], dtype=torch.uint8), [1, 0]),
        "floats": (torch.tensor([[0.5, math.nan]]), [128, 0]),
    }
    tracker.log_images({name: image for name, (image, _) in shown.items()}, 1)
    events = read(tracker)
    for name, (_, expected) in shown.items():
        (event,) = events.Images(name)
        picture = Image.open(io.BytesIO(event.encoded_image_string)).convert("L")
        assert list(picture.tobytes()) == expected


@pytest.mark.parametrize("by_argument", [True, False])
def test_resuming_hides_the_steps_that_are_logged_again(tmp_path, by_argument):
    for start, steps in [(None, range(5)), (3, range(3, 6))]:
        tracker = TensorBoardTracker("run", tmp_path, purge_step=start if by_argument else None)
        if start and not by_argument:
            tracker.resume(None, start - 1)
        tracker.start()
        for step in steps:
            tracker.log({"loss": step + (10 if start else 0)}, step)
        tracker.finish()
        if not by_argument:
            tracker.start()  # an evaluation behind it hides nothing
            tracker.finish()
    expected = [(0, 0), (1, 1), (2, 2), (3, 13), (4, 14), (5, 15)]
    assert scalars(read(tracker), "loss") == expected
    of_the_page = PageAccumulator(str(tracker.log_dir))  # it hides by other rules
    of_the_page.Reload()
    found = [
        (each.step, tensor_util.make_ndarray(each.tensor_proto))
        for each in of_the_page.Tensors("loss")
    ]
    assert found == expected


def test_resolved_by_name_with_options_and_without_a_file_before_start(tmp_path):
    (tracker,) = resolve_trackers(
        "tensorboard",
        project_name="project",
        logging_dir=tmp_path,
        init_kwargs={"tensorboard": {"filename_suffix": ".mine"}},
    )
    assert not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="call `start` first"):
        tracker.tracker
    tracker.start()
    for _ in range(2):
        tracker.finish()
    (file,) = (tmp_path / "project").iterdir()
    assert file.name.endswith(".mine")
    with pytest.raises(RuntimeError, match="not open"):
        tracker.log({"loss": 1.0}, 1)


class Frame:
    """What pandas has; the test needs no pandas."""

    columns = ["a", "b"]
    rows = ("of a column", "that is called so")

    def __init__(self, rows):
        self._rows = rows

    def to_numpy(self):
        return np.array([[0.0]])  # of one type, which integers beside floats take on

    def itertuples(self, index=True, name="Pandas"):
        assert (index, name) == (False, None)
        return (tuple(row) for row in self._rows)


class PolarsFrame:
    columns = ["a", "b"]

    def __init__(self, rows):
        self._rows = rows

    def rows(self):
        return [tuple(row) for row in self._rows]


def test_tables_are_texts_in_markdown(tracker):
    rows = [["x | y", 1], ["two\nlines", torch.tensor(2.5)]]
    cells = "| x \\| y | 1 |\n| two<br>lines | 2.5 |"
    tracker.log_table("named", columns=["a", "b"], data=rows, step=3)
    tracker.log_table("bare", data=rows, walltime=12.0)
    tracker.log_table("frame", dataframe=Frame(rows), step=4)
    tracker.log_table("polars", dataframe=PolarsFrame(rows))
    tracker.log_table("empty", columns=["a"], data=[])
    events = read(tracker)
    assert text(events, "named") == f"| a | b |\n| --- | --- |\n{cells}"
    assert text(events, "bare") == f"| 1 | 2 |\n| --- | --- |\n{cells}"
    assert text(events, "frame") == text(events, "polars") == text(events, "named")
    assert text(events, "empty") == "| a |\n| --- |"
    steps = {name: events.Tensors(f"{name}/text_summary")[0].step for name in ("named", "frame")}
    assert steps == {"named": 3, "frame": 4}
    assert events.Tensors("bare/text_summary")[0].wall_time == 12.0


def test_invalid_tables_are_refused(tracker):
    with pytest.raises(ValueError, match="'t' is empty"):
        tracker.log_table("t")
    with pytest.raises(ValueError, match="Row 1 of the table 't' has 1 cells, but there are 2"):
        tracker.log_table("t", data=[[1, 2], [3]])


def test_lists_of_images_and_batches_that_cannot_be_joined_are_seen_one_by_one(tracker):
    small, large = np.zeros((3, 4, 5), np.uint8), np.zeros((3, 6, 7), np.uint8)
    tracker.log_images(
        {
            "sizes": [small, large],
            "alike": [torch.zeros(4, 5, dtype=torch.bfloat16), np.zeros((4, 5))],
            "clear": np.zeros((2, 4, 4, 5), np.uint8),  # torch's writer joins colours alone
            "none": small[:0].reshape(0, 3, 4, 5),
            "nothing": [],
        },
        1,
    )
    events = read(tracker)
    seen = {name: events.Images(name)[0] for name in events.Tags()["images"]}
    assert {name: (one.width, one.height) for name, one in seen.items()} == {
        "sizes/0": (5, 4),
        "sizes/1": (7, 6),
        "alike": (10, 4),
        "clear/0": (5, 4),
        "clear/1": (5, 4),
    }


def test_a_full_disk_leaves_whole_events(tracker):
    tracker.log({"x": 0.0}, 0)
    (file,) = tracker.log_dir.iterdir()
    size = file.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        for _ in range(3):
            with pytest.raises(OSError, match="bytes could be written"):
                tracker.log_text({"t": "1" * 1000}, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.stat().st_size == size
    tracker.log({"x": 2.0}, 2)
    tracker.finish()
    assert list(tracker.log_dir.iterdir()) == [file]
    assert scalars(read(tracker), "x") == [(0, 0.0), (2, 2.0)]


def test_a_start_on_a_full_disk_leaves_no_file(tmp_path):
    tracker = TensorBoardTracker("run", tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="bytes could be written"):
            tracker.start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tracker.log_dir.iterdir()) == []


def test_events_are_written_by_the_calling_thread_at_once(tmp_path):
    before = threading.active_count()
    tracker = TensorBoardTracker("run", tmp_path)
    tracker.start()
    assert threading.active_count() == before
    sizes = []
    for step in range(3):
        tracker.log({"x": 1.0}, step)
        sizes.append(sum(path.stat().st_size for path in tracker.log_dir.iterdir()))
    tracker.writer.add_scalar("of one's own", 2.0, 3)
    assert sizes[0] < sizes[1] < sizes[2]
    assert scalars(read(tracker), "of one's own") == [(3, 2.0)]
    assert tracker.tracker.file_writer.get_logdir() == str(tracker.log_dir)
    tracker.finish()


@pytest.mark.parametrize("gone", ["file", "folder"])
def test_curves_go_on_in_another_file_if_theirs_is_gone(tracker, caplog, gone):
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"x": 0.0}, 0)
    (file,) = tracker.log_dir.iterdir()
    if gone == "file":
        file.unlink()
    else:
        tracker.log_dir.rename(tracker.log_dir.with_name("elsewhere"))
    for step in (1, 2):
        tracker.log({"x": float(step)}, step)
    tracker.finish()
    events = read(tracker)
    assert scalars(events, "x") == [(1, 1.0), (2, 2.0)]
    assert events.file_version == 2
    assert sum("moved or replaced" in record.message for record in caplog.records) == 1
    (other,) = tracker.log_dir.iterdir()
    assert other.name > file.name  # an open page would go on reading at the old place of the first


def test_a_writer_that_a_script_closes_goes_on_in_its_file(tracker):
    for step in (1, 2):
        with tracker.tracker as writer:
            writer.add_scalar("mine", 1.0, step)
        tracker.log({"x": float(step)}, step)
    tracker.finish()
    assert len(list(tracker.log_dir.iterdir())) == 1
    events = read(tracker)
    assert scalars(events, "x") == [(1, 1.0), (2, 2.0)]
    assert scalars(events, "mine") == [(1, 1.0), (2, 1.0)]


def test_two_threads_and_a_disk_that_fills_and_empties_tear_no_event(tracker):
    """The disk takes only half of each third event, while another thread waits to write."""
    numbers = itertools.count(1)

    class Filling(io.FileIO):
        def write(self, data):
            written = super().write(data[: len(data) // 2] if next(numbers) % 3 == 0 else data)
            time.sleep(0.0005)  # the other thread would come now, if nothing kept it out
            return written

    file = tracker.tracker.file_writer.event_writer
    file._file.close()
    file._file = Filling(file.path, "a")

    def log(name):
        for step in range(40):
            with contextlib.suppress(OSError):
                tracker.tracker.add_scalar(name, float(step), step)

    others = [threading.Thread(target=log, args=(name,)) for name in ("a", "b")]
    for other in others:
        other.start()
    for other in others:
        other.join()
    tracker.finish()
    events = read(tracker)
    assert len(scalars(events, "a")) + len(scalars(events, "b")) == 80 - 80 // 3


def test_a_second_run_has_no_configuration_of_the_first(tmp_path):
    tracker = TensorBoardTracker("run", tmp_path)
    for number in range(2):
        tracker.begin_anew()
        tracker.start()
        if number == 0:
            tracker.store_init_configuration({"lr": 1})
        tracker.status = "finished"
        tracker.finish()
    (new,) = tracker.log_dir.glob("*tfevents*")
    known = EventAccumulator(str(new)).Reload().summary_metadata
    assert known.keys() == {"status/text_summary"}


def test_the_end_makes_no_new_file(tracker):
    tracker.log({"x": 0.0}, 0)
    (file,) = tracker.log_dir.iterdir()
    file.unlink()
    tracker.status = "finished"
    tracker.finish()
    assert list(tracker.log_dir.iterdir()) == []


@pytest.mark.parametrize("status", ["failed", "running"])
def test_the_status_is_a_text_once_it_is_known(tracker, status):
    tracker.status = status
    tracker.finish()
    assert ("status/text_summary" in read(tracker).Tags()["tensors"]) == (status == "failed")


def test_histograms_figures_texts_and_graphs(tracker):
    from matplotlib.figure import Figure

    tracker.log_histogram({"h": torch.tensor([0.0, 1.0, float("nan")])}, 2)
    tracker.log_figure({"f": Figure(figsize=(2, 1), dpi=50)}, 3)
    tracker.log_text({"t": "**bold**"}, 4)
    tracker.log_graph(torch.nn.Linear(3, 2), torch.zeros(1, 3))
    events = read(tracker)
    (histogram,) = events.Histograms("h")
    assert (histogram.step, histogram.histogram_value.num) == (2, 2)
    (figure,) = events.Images("f")
    assert (figure.step, figure.width, figure.height) == (3, 100, 50)
    assert text(events, "t") == "**bold**"
    assert any("Linear" in node.name for node in events.Graph().node)


def test_a_fit_that_begins_anew_has_the_folder_to_itself(tmp_path):
    def run(value, *, begin=True, **options):
        tracker = TensorBoardTracker("run", tmp_path, **options)
        if begin:
            tracker.begin_anew()
        tracker.start()
        tracker.log({"loss": value}, 1)
        tracker.finish()
        return sorted(value for _, value in scalars(read(tracker), "loss"))

    def renamed():
        return sorted(tmp_path.glob("run/*earlier*"))

    run(1.0)
    (first,) = (tmp_path / "run").iterdir()
    content = first.read_bytes()
    assert run(2.0) == [2.0]
    (aside,) = renamed()
    assert aside.read_bytes() == content
    assert run(3.0, begin=False) == [2.0, 3.0]  # as in a loop of one's own
    run(4.0, purge_step=5)  # it says itself what is dropped
    assert renamed() == [aside]
    first.write_bytes(b"")  # a name that is taken by a renamed file
    assert run(5.0) == [5.0]
    assert len(renamed()) == 5
    assert aside.read_bytes() == content


def test_the_version_of_the_code(tmp_path):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init"], ["commit", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    tracker = TensorBoardTracker("run", tmp_path)
    tracker.start()
    tracker.store_init_configuration({})
    assert text(read(tracker), "code") == head.strip()
    tracker.finish()


def hparams_page(folder):
    """What TensorBoard's page of hyper-parameters has: their names, those of metrics, the runs."""
    runs = EventMultiplexer().AddRunsFromDirectory(str(folder))
    runs.Reload()
    provider = MultiplexerDataProvider(runs, str(folder))
    tensorboard = TBContext(logdir=str(folder), multiplexer=runs, data_provider=provider)
    context, request = backend_context.Context(tensorboard), RequestContext()
    known = context.hparams_metadata(request, "")
    page = context.experiment_from_metadata(request, "", True, known, None)
    question = api_pb2.ListSessionGroupsRequest(
        slice_size=10, allowed_statuses=api_pb2.Status.values(), include_metrics=True
    )
    groups = list_session_groups.Handler(request, context, "", question).run().session_groups
    names = {info.name for info in page.hparam_infos}, {info.name.tag for info in page.metric_infos}
    return *names, {group.name: group for group in groups}


def test_the_page_of_hyper_parameters_compares_runs_by_their_metrics(tmp_path):
    settings = {"one": {"lr": 0.5}, "two": {"lr": 0.25, "wide": True}, "three": {}, "four": {}}
    ends = dict(zip(settings, ("finished", "failed", "preempted", "running"), strict=True))
    for name, hyper in settings.items():
        tracker = TensorBoardTracker(name, tmp_path)
        tracker.start()
        tracker.store_init_configuration({"model": hyper})
        tracker.log({"val/loss": hyper.get("lr", 0) * 2}, 1)
        tracker.log({"val/loss": hyper.get("lr", 0) * 4}, 2)
        tracker.status = ends[name]
        tracker.finish()
    hyper, metrics, runs = hparams_page(tmp_path)
    assert hyper == {"model.lr", "model.wide"}  # of all runs, not of whichever is read first
    assert metrics == {"val/loss"}
    assert [runs[name].metric_values[0].value for name in ("one", "two")] == [2.0, 1.0]
    assert runs["two"].hparams["model.wide"].string_value == "True"
    statuses = {name: run.sessions[0].status for name, run in runs.items()}
    unknown = dict.fromkeys(settings, api_pb2.STATUS_UNKNOWN)
    assert statuses == unknown | {"one": api_pb2.STATUS_SUCCESS}


def test_the_program_may_import_tensorboard_while_the_tracker_starts():
    program = (
        "import time, torch, trackers\n"
        "(one,) = trackers.resolve_trackers('tensorboard', project_name='p', logging_dir='d')\n"
        "background = trackers.BackgroundTracker(one)\n"
        "background.start()\n"
        "time.sleep(0.05)\n"
        "from torch.utils.tensorboard import SummaryWriter\n"
        "assert isinstance(background.writer, SummaryWriter)\n"
        "background.finish()\n"
        "print(background.failures)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("0\n", "")
