import logging
import math
import threading
import weakref

import pytest
import torch

from trackers import (
    BackgroundTracker,
    GeneralTracker,
    JsonlTracker,
    NullTracker,
    read_metrics,
    worker,
)
from trackers.background import finish_all
from trackers.pending import RecordReplay


class Recorder(GeneralTracker):
    """Remembers its calls and the threads that made them."""

    name = "recorder"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self):
        self.calls = []
        self.threads = set()

    @property
    def tracker(self):
        return self.calls

    def _note(self, *call):
        self.calls.append(call)
        self.threads.add(threading.current_thread())

    def start(self):
        self._note("start")

    def store_init_configuration(self, values):
        self._note("configuration", values)

    def log(self, values, step, **kwargs):
        self._note("log", values, step, kwargs)

    def log_images(self, values, step, **kwargs):
        self._note("images", values, step, kwargs)

    def log_table(self, table_name, *args, **kwargs):
        self._note("table", table_name, args, kwargs)

    def finish(self):
        self._note("finish")

    @property
    def steps(self):
        return [call[2] for call in self.calls if call[0] == "log"]


class Blocking(Recorder):
    """Its first `log` announces itself and waits until it is released."""

    def __init__(self):
        super().__init__()
        self.entered, self.release = threading.Event(), threading.Event()

    def log(self, values, step, **kwargs):
        self.entered.set()
        self.release.wait()
        super().log(values, step, **kwargs)


class Failing(Recorder):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def log(self, values, step, **kwargs):
        super().log(values, step, **kwargs)
        raise self.error


def started(tracker, **options):
    background = BackgroundTracker(tracker, **options)
    background.start()
    return background


@pytest.fixture
def blocked():
    """A background tracker whose thread waits in the `log` of step 0."""
    tracker = Blocking()
    background = started(tracker, capacity=4)
    background.log({}, 0)
    tracker.entered.wait()
    yield background
    tracker.release.set()
    background.finish()
    background._worker.thread.join()


def warnings_of(caplog):
    return [record for record in caplog.records if record.levelno == logging.WARNING]


def test_every_call_runs_in_order_on_one_other_thread_that_ends(caplog):
    recorder = Recorder()
    background = started(recorder)
    background.store_init_configuration({"lr": 1})
    for step in range(100):
        background.log({"x": step}, step, key="value")
    background.log_images({"image": 1}, 100, dataformats="HW")
    background.log_table("table", columns=["a"], data=[[1]])
    background.finish()
    assert recorder.calls == [
        ("start",),
        ("configuration", {"lr": 1}),
        *(("log", {"x": step}, step, {"key": "value"}) for step in range(100)),
        ("images", {"image": 1}, 100, {"dataformats": "HW"}),
        ("table", "table", (), {"columns": ["a"], "data": [[1]]}),
        ("finish",),
    ]
    (thread,) = recorder.threads
    assert thread is not threading.current_thread()
    assert thread.daemon
    assert not thread.is_alive()
    assert (background.failures, background.dropped) == (0, 0)
    assert not warnings_of(caplog)


def test_attributes_and_object_of_the_tracker():
    recorder = Recorder()
    background = BackgroundTracker(recorder)
    assert background.name == "recorder"
    assert background.requires_logging_directory is False
    assert background.main_process_only is False
    background.start()
    assert background.tracker is recorder.calls
    assert ("start",) in recorder.calls  # it has waited for the start
    background.finish()


def test_values_are_those_of_the_time_of_the_call(blocked):
    tensor, rows = torch.zeros(1), [[1]]
    values = {"x": 1, "parts": {"loss": tensor}}
    blocked.store_init_configuration(values)
    blocked.log(values, 1)
    blocked.log_images(values, 1)
    blocked.log_table("table", data=rows)
    values["x"] = 2
    values["parts"]["new"] = 3
    rows.append([2])
    tensor += 1
    blocked.wrapped.release.set()
    blocked.finish()
    then = {"x": 1, "parts": {"loss": torch.zeros(1)}}
    assert blocked.wrapped.calls[-5:-1] == [
        ("configuration", then),
        ("log", then, 1, {}),
        ("images", then, 1, {}),
        ("table", "table", (), {"data": [[1]]}),
    ]


def test_a_full_queue_drops_the_oldest_records_and_nothing_else(blocked, caplog):
    blocked.store_init_configuration({"lr": 1})
    for step in range(1, 8):
        blocked.log({}, step)
    assert blocked.dropped == 4
    blocked.wrapped.release.set()
    blocked.finish()
    assert blocked.wrapped.steps == [0, 5, 6, 7]
    assert ("configuration", {"lr": 1}) in blocked.wrapped.calls
    (warning,) = warnings_of(caplog)
    assert "lost 4 records and failed in 0 calls." in warning.getMessage()


def test_values_that_are_refused_are_reported_once_and_counted(caplog):
    error = ValueError("too long")
    background = started(Failing(error))
    for step in range(5):
        background.log({}, step)
    for _ in range(2):
        background.finish()
    assert (background.failures, background.dropped) == (5, 0)
    assert background.wrapped.steps == list(range(5))
    assert background.wrapped.calls[-1] == ("finish",)
    first, last = warnings_of(caplog)
    assert first.name == "trackers"
    assert f"'recorder' failed in `log`: {error!r}" in first.getMessage()
    assert first.exc_info[1] is error
    assert "lost 0 records and failed in 5 calls." in last.getMessage()


def test_a_start_that_raises_is_reported_and_raised_only_by_tracker(caplog):
    class NoServer(Recorder):
        def start(self):
            raise ConnectionError("no server")

    background = started(NoServer(), finish_timeout=0.1)
    with pytest.raises(ConnectionError, match="no server"):
        background.tracker
    background.finish()
    assert "failed in `start`" in caplog.text


def test_finish_leaves_a_tracker_that_hangs_behind(caplog):
    blocking = Blocking()
    background = started(blocking, finish_timeout=0.01)
    background.log({}, 0)
    blocking.entered.wait()
    background.log({}, 1)
    background.log({}, 2)
    future = background.submit(lambda tracker: tracker.steps)
    background.finish()
    (warning,) = warnings_of(caplog)
    assert "lost 2 records" in warning.getMessage()
    assert "abandoned in `log` after 0.01 seconds" in warning.getMessage()
    assert background.dropped == 2
    with pytest.raises(TimeoutError, match="was finished before this call ran"):
        future.result()
    # Where the tracker goes on at last, its run is closed and the thread ends.
    blocking.release.set()
    background._worker.thread.join()
    assert blocking.steps == [0]
    assert blocking.calls[-1] == ("finish",)


def test_a_long_finish_is_reported_while_waiting(monkeypatch, caplog):
    monkeypatch.setattr(worker, "_WARN_AFTER", 0.01)
    blocking = Blocking()
    background = BackgroundTracker(blocking, finish_timeout=60.0)

    class Release(logging.Handler):
        def emit(self, record):
            blocking.release.set()

    logging.getLogger("trackers").addHandler(handler := Release())
    background.start()
    background.log({}, 0)
    blocking.entered.wait()
    background.finish()
    logging.getLogger("trackers").removeHandler(handler)
    (warning,) = warnings_of(caplog)
    assert warning.getMessage().startswith("Waiting for the tracker 'recorder', at most 60 seconds")
    assert warning.getMessage().endswith("it is in `log`.")
    assert blocking.calls[-1] == ("finish",)


def test_tracker_times_out_if_start_hangs():
    class Hanging(Recorder):
        release = threading.Event()

        def start(self):
            self.release.wait()

    background = started(Hanging(), finish_timeout=0.01)
    with pytest.raises(TimeoutError):
        background.tracker
    Hanging.release.set()
    background.finish()
    background._worker.thread.join()


def test_calls_after_finish_are_counted_as_dropped():
    background = started(Recorder())
    background.finish()
    background.log({}, 1)
    background.finish()
    assert background.dropped == 1
    with pytest.raises(RuntimeError, match="is finished"):
        background.submit(lambda tracker: None).result()
    with pytest.raises(RuntimeError, match="started only once"):
        background.start()
    assert background.wrapped.calls == [("start",), ("finish",)]


def test_records_before_start_wait_for_it():
    background = BackgroundTracker(Recorder())
    background.log({}, 1)
    background.start()
    background.finish()
    assert [call[0] for call in background.wrapped.calls] == ["start", "log", "finish"]


def test_finish_without_start_reports_what_is_lost(caplog):
    background = BackgroundTracker(Recorder())
    background.log({}, 1)
    background.finish()
    assert background.dropped == 1
    assert "lost 1 records" in caplog.text
    assert background.wrapped.calls == []


def test_submit_runs_behind_all_that_was_logged_before(tmp_path):
    background = started(JsonlTracker(tmp_path / "metrics.jsonl"))
    background.log({"x": 1}, 1)
    synced = background.submit(lambda record: record.sync())
    background.log({"x": 2}, 2)
    background.finish()
    background.wrapped.truncate(synced.result())
    assert [record["step"] for record in read_metrics(background.wrapped.path)] == [1]


def test_submit_gives_back_the_error_and_cannot_be_cancelled(blocked):
    def fail(tracker):
        raise OSError("disk")

    future = blocked.submit(fail)
    assert not future.cancel()
    blocked.wrapped.release.set()
    with pytest.raises(OSError, match="disk"):
        future.result()


def test_an_idle_thread_keeps_no_tensor_alive():
    class Forgetful(Recorder):
        def log(self, values, step, **kwargs):
            weakref.finalize(values["x"], gone.set)

    gone = threading.Event()
    background = started(Forgetful())
    background.log({"x": torch.zeros(1)}, 1)
    assert gone.wait(20)  # only a failure waits that long
    background.finish()


def test_the_memory_of_waiting_images_is_bounded():
    tracker = Blocking()
    background = started(tracker, memory=1000)
    background.log({}, 0)
    tracker.entered.wait()
    for step in range(1, 6):
        background.log_images({"x": torch.zeros(100)}, step)
        background.log({"loss": float(step)}, step)
    assert background.dropped == 3
    tracker.release.set()
    background.drain(20)
    for step in (6, 7):  # what was logged takes no more
        background.log_images({"x": torch.zeros(100)}, step)
    background.finish()
    assert [call[2] for call in tracker.calls if call[0] == "images"] == [4, 5, 6, 7]
    assert tracker.steps == list(range(6))  # numbers take none


class Outcome(Recorder):
    """Notes its status too."""

    def start(self):
        self._note("start", self.status)

    def finish(self):
        self._note("finish", self.status)


@pytest.mark.parametrize(("said", "seen"), [(None, "finished"), ("failed", "failed")])
def test_the_status_reaches_the_tracker_before_it_finishes(said, seen):
    tracker = Outcome()
    for _ in range(2):  # an instance may go through several runs
        background = BackgroundTracker(tracker)
        assert background.status == "running"
        background.start()
        if said is not None:
            background.status = said
        background.finish()
        assert background.status == tracker.status == seen
    assert tracker.calls == [("start", "running"), ("finish", seen)] * 2


def test_finish_all_skips_finished_trackers():
    first, second, null = BackgroundTracker(Outcome()), BackgroundTracker(Outcome()), NullTracker()
    for background in (first, second):
        background.start()
    first.finish()
    finish_all([first, second, null], "failed")
    assert [one.status for one in (first, second, null)] == ["finished", "failed", "failed"]
    assert first.wrapped.calls[1:] == [("finish", "finished")]
    assert second.wrapped.calls[1:] == [("finish", "failed")]


def test_several_that_hang_share_one_time_limit():
    """The second is asked to end before the first is waited for."""

    class Waiting(Recorder):
        def __init__(self, mine, other):
            super().__init__()
            self.mine, self.other = mine, other

        def finish(self):
            self.mine.set()
            self._note("met", self.other.wait(20))

    here, there = threading.Event(), threading.Event()
    trackers = [BackgroundTracker(Waiting(here, there)), BackgroundTracker(Waiting(there, here))]
    for tracker in trackers:
        tracker.start()
    finish_all(trackers, "finished")
    assert [tracker.wrapped.calls[-1] for tracker in trackers] == [("met", True)] * 2


class Plain(GeneralTracker):
    """Only what it must define, and a method of its own."""

    name = "plain"
    requires_logging_directory = False
    tracker = None

    def __init__(self):
        self.seen = []

    def log(self, values, step):
        self.seen.append((values, step))

    def count(self):
        return len(self.seen)


def test_unsupported_methods_are_reported_once(caplog):
    background = started(Plain())
    for _ in range(2):
        background.log_images({"x": 1}, 1)
        background.log_table("t", data=[[1]])
        background.log_histogram({}, 1)
        background.log_figure({}, 1)
        background.log_text({}, 1)
        background.log_artifact("path")
        background.log_model("path")
    background.finish()
    kinds = ("images", "table", "histogram", "figure", "text", "artifact", "model")
    assert [message.split("; ")[0] for message in caplog.messages] == [
        f"The tracker 'plain' does not implement log_{kind}" for kind in kinds
    ]
    assert (background.failures, background.dropped) == (0, 0)


def test_attributes_of_the_tracker_itself_are_there_once_it_has_started():
    class Opening(Plain):
        release = threading.Event()

        def start(self):
            self.release.wait()
            self.opened = True

    background = BackgroundTracker(Opening())
    assert background.count() == 0
    background.start()
    threading.Timer(0.01, Opening.release.set).start()
    assert background.opened
    background.log({"x": 1})
    for missing in ("nothing_like_it", "_seen", "__len__"):
        with pytest.raises(AttributeError, match=missing):
            getattr(background, missing)
    background.finish()
    assert background.seen == [({"x": 1}, None)]


def test_values_of_a_device_are_read_when_they_have_arrived(monkeypatch):
    """A stand-in for a device: its copy to the host is there once its event was waited for."""

    class Event:
        def __init__(self, host):
            self.host = host

        def synchronize(self):
            self.host.fill_(7)

    def to_host(tensor, arrivals):
        host = torch.zeros(1)
        arrivals.append(Event(host))
        return host

    monkeypatch.setattr("trackers.media._to_host", to_host)
    recorder = Recorder()
    background = started(recorder)
    background.store_init_configuration({"x": torch.ones(1)})
    background.log({"x": {"y": [torch.ones(1)]}}, 1)
    background.finish()
    assert recorder.calls[1:3] == [
        ("configuration", {"x": torch.tensor([7.0])}),
        ("log", {"x": {"y": [torch.tensor([7.0])]}}, 1, {}),
    ]


class Rich(Recorder):
    """It takes everything, and its run has an id once it has begun."""

    def __init__(self):
        super().__init__()
        self.run_id = None

    def resume(self, run_id, step):
        self._note("resume", run_id, step)

    def begin_anew(self):
        self._note("begin_anew")

    def start(self):
        super().start()
        self.run_id = "an id"

    def log_histogram(self, values, step, **kwargs):
        self._note("histogram", values, step, kwargs)

    def log_figure(self, values, step, **kwargs):
        self._note("figure", values, step, kwargs)

    def log_text(self, values, step, **kwargs):
        self._note("text", values, step, kwargs)

    def log_artifact(self, path, name=None, kind="artifact", step=None):
        self._note("artifact", path, name, kind, step)

    def log_model(self, path, name=None, step=None):
        self._note("model", path, name, step)


def test_rich_values_and_files_reach_the_tracker():
    tracker = Rich()
    background = started(tracker)
    background.log_histogram({"h": 1}, 1, bins=3)
    background.log_figure({"f": 1}, 2)
    background.log_text({"t": "x"}, 3)
    background.log_artifact("path", "name", "dataset", 4)
    background.log_model("path", step=5)
    background.finish()
    assert tracker.calls[1:-1] == [
        ("histogram", {"h": 1}, 1, {"bins": 3}),
        ("figure", {"f": 1}, 2, {}),
        ("text", {"t": "x"}, 3, {}),
        ("artifact", "path", "name", "dataset", 4),
        ("model", "path", None, 5),
    ]
    assert threading.current_thread() not in tracker.threads


def test_a_full_queue_keeps_files():
    class Blocked(Rich, Blocking):
        pass

    tracker = Blocked()
    background = started(tracker, capacity=1)
    background.log({}, 0)
    tracker.entered.wait()
    background.log_model("path", step=1)
    background.log_artifact("path", step=1)
    for step in range(1, 4):
        background.log({}, step)
    tracker.release.set()
    background.finish()
    assert [call[0] for call in tracker.calls if call[0] in ("model", "artifact")] == [
        "model",
        "artifact",
    ]
    assert background.dropped == 2
    assert tracker.steps == [0, 3]


@pytest.mark.parametrize("call", [("resume", "earlier", 7), ("begin_anew",)])
def test_resume_and_begin_anew_are_called_before_start(call):
    tracker = Rich()
    background = BackgroundTracker(tracker)
    assert background.run_id is None
    getattr(background, call[0])(*call[1:])
    background.start()
    assert background.tracker is tracker.calls  # it has begun
    assert background.run_id == "an id"
    background.finish()
    assert tracker.calls[:2] == [call, ("start",)]
    assert background.run_id == "an id"


# -- outages ---------------------------------------------------------------------------------------


class Away(Recorder):
    """Its service is away while `there` is not set."""

    def __init__(self):
        super().__init__()
        self.there, self.tried = threading.Event(), threading.Event()
        self.resumed = []

    def _reach(self):
        self.tried.set()
        if not self.there.is_set():
            raise ConnectionError("refused")

    def resume(self, run_id, step):
        self.resumed.append((run_id, step))

    def log(self, values, step, **kwargs):
        self._reach()
        super().log(values, step, **kwargs)


SLOW = {"first_pause": 1000.0, "longest_pause": 1000.0}  # whoever waits for it runs out of time
QUICK = {"first_pause": 0.001, "longest_pause": 0.002}


def test_a_service_that_returns_has_all_records_once_and_in_order(caplog):
    tracker = Away()
    background = started(tracker, **QUICK)
    background.log({}, 0)
    tracker.tried.wait()
    background.store_init_configuration({"lr": 1})
    for step in range(1, 50):
        background.log({}, step)
    tracker.there.set()
    background.finish()
    assert tracker.steps == list(range(50))
    assert tracker.calls[2] == ("configuration", {"lr": 1})
    assert tracker.calls[-1] == ("finish",)
    assert background.dropped == 0
    assert "failed in `log`: ConnectionError('refused')" in caplog.messages[0]
    assert len(caplog.messages) == 2
    assert "lost 0 records and failed in" in caplog.messages[1]


def test_the_end_interrupts_a_pause_and_pauses_grow_anew():
    tracker = Away()
    background = started(tracker, **SLOW)
    background.log({}, 0)
    tracker.tried.wait()
    tracker.there.set()
    background.finish()
    assert tracker.steps == [0]
    assert background.dropped == 0


def test_a_service_that_stays_down_loses_the_queue_and_is_closed(caplog):
    tracker = Away()
    background = started(tracker, finish_timeout=0.2, **QUICK)
    for step in range(5):
        background.log({}, step)
    background.log_table("table", data=[])
    background.store_init_configuration({})
    background.finish()
    assert background.dropped == 6
    assert tracker.calls == [("start",), ("finish",)]
    assert "lost 6 records and failed in" in caplog.messages[-1]


def test_resume_is_called_before_each_attempt_to_start():
    class Late(Away):
        def start(self):
            self._reach()
            super().start()

    tracker = Late()
    background = BackgroundTracker(tracker, **QUICK)
    background.resume("earlier", 3)
    background.start()
    background.log({}, 4)
    tracker.tried.wait()
    tracker.there.set()
    background.drain(20)
    assert background.tracker is tracker.calls
    background.finish()
    assert [call[0] for call in tracker.calls] == ["start", "log", "finish"]
    assert len(tracker.resumed) == background.failures + 1 > 1
    assert set(tracker.resumed) == {("earlier", 3)}


def test_a_start_that_is_refused_for_good_is_not_tried_again():
    class Refused(Away):
        def start(self):
            super().start()
            raise ValueError("no such project")

    background = started(Refused(), **SLOW)
    for step in range(3):
        background.log({}, step)
    background.finish()
    assert background.failures == 4
    assert background.wrapped.calls == [("start",), ("finish",)]


def test_a_record_that_is_refused_while_others_pass_does_not_block_them():
    class Picky(Recorder):
        def log(self, values, step, **kwargs):
            if step == 1:
                raise RuntimeError("400 Bad Request")
            super().log(values, step, **kwargs)

    background = started(Picky(), **QUICK)
    for step in range(7):
        background.log({}, step)
    background.drain(20)
    assert background.wrapped.steps == [0, 2, 3, 4, 5, 6]
    assert background.dropped == 1
    background.finish()


def test_submit_does_not_wait_for_the_end_of_an_outage():
    tracker = Away()
    background = started(tracker, **SLOW)
    background.log({}, 0)
    background.log({}, 1)
    assert background.submit(lambda one: one.steps).result(20) == []
    tracker.there.set()
    background.drain(20)
    assert tracker.steps == [0, 1]
    background.finish()


# -- what a full queue dropped ---------------------------------------------------------------------


@pytest.fixture
def local(tmp_path):
    """A local record with one of an earlier run, whose clock was ahead."""
    record = BackgroundTracker(JsonlTracker(tmp_path / "metrics.jsonl"), **QUICK)
    record.start()
    record.log({"x": -1.0}, 3, time=15.0)
    yield record
    record.finish()


def begin(tracker, local, **options):
    background = BackgroundTracker(tracker, **options)
    offset = local.submit(lambda record: record.offset)
    background.replay = RecordReplay(local, offset, {"private"})
    background.start()
    return background


def record_both(local, background, steps):
    for step in steps:
        value = math.nan if step == 4 else step / 3
        local.log({"x": value, "private": 0.0}, step, time=10.0 + step)
        background.log_recorded({"x": value}, step, 10.0 + step)


def logged(tracker):
    return [(call[2], str(call[1])) for call in tracker.calls if call[0] == "log"]


def expected(steps):
    return [(step, str({"x": math.nan if step == 4 else step / 3})) for step in steps]


def test_dropped_records_are_read_back_in_order(local, caplog):
    tracker = Blocking()
    background = begin(tracker, local, capacity=3)
    for steps in (range(20), range(20, 40)):
        record_both(local, background, steps[:1])
        tracker.entered.wait()
        record_both(local, background, steps[1:])
        assert len(background._worker.pending._calls) == 3
        tracker.release.set()
        background.drain(20)
        tracker.entered.clear()
        tracker.release.clear()
    tracker.release.set()
    background.finish()
    assert logged(tracker) == expected(range(40))
    # `drain` is a call too, for which nothing is dropped.
    assert (background.replayed, background.dropped) == (32, 0)
    assert not warnings_of(caplog)


def overflow(tracker, local, background):
    """Log 20 records while the tracker waits in the first, so that its queue drops some."""
    record_both(local, background, [0])
    tracker.entered.wait()
    record_both(local, background, range(1, 20))
    tracker.release.set()


class BlockingInReplay(Blocking):
    """It blocks a second time, at a record that is replayed."""

    def __init__(self):
        super().__init__()
        self.replaying, self.go_on = threading.Event(), threading.Event()

    def log(self, values, step, **kwargs):
        if step == 5:
            self.replaying.set()
            self.go_on.wait()
        super().log(values, step, **kwargs)


def test_records_that_come_during_replay_are_not_lost(local):
    tracker = BlockingInReplay()
    background = begin(tracker, local, capacity=3)
    overflow(tracker, local, background)
    tracker.replaying.wait()
    record_both(local, background, range(20, 40))
    tracker.go_on.set()
    background.finish()
    assert logged(tracker) == expected(range(40))
    assert background.dropped == 0


def test_records_missed_by_a_hang_during_replay_are_counted(local):
    tracker = BlockingInReplay()
    background = begin(tracker, local, capacity=3, finish_timeout=0.2)
    overflow(tracker, local, background)
    tracker.replaying.wait()
    background.finish()
    assert background.dropped == 15
    tracker.go_on.set()
    background._worker.thread.join()


@pytest.mark.parametrize("returns", [True, False])
def test_an_outage_while_records_are_replayed(local, returns, caplog):
    class Again(Blocking):
        def log(self, values, step, **kwargs):
            if step >= 5 and not self.there:
                self.there = returns
                raise ConnectionError("again")
            super().log(values, step, **kwargs)

    tracker = Again()
    tracker.there = False
    background = begin(tracker, local, capacity=3, finish_timeout=30 if returns else 2, **QUICK)
    overflow(tracker, local, background)
    background.finish()
    assert logged(tracker) == expected(range(20 if returns else 5))
    assert background.dropped == (0 if returns else 15)
    if not returns:
        where = f"lost 15 records, which are in {local.tracker}, and failed"
        assert where in caplog.messages[-1]


def test_records_missing_from_the_local_record_are_counted_as_lost(local):
    tracker = Blocking()
    background = begin(tracker, local, capacity=3)
    background.log({}, 0)
    tracker.entered.wait()
    record_both(local, background, [1, 2])
    background.log_recorded({"x": 3.0}, 3, 13.0)  # the disk refused it
    background.log({"by hand": 1}, 3)
    record_both(local, background, range(4, 8))
    tracker.release.set()
    background.finish()
    assert [step for step, _ in logged(tracker)] == [0, 1, 2, 4, 5, 6, 7]
    assert background.dropped == 2


def test_an_unreadable_local_record_is_reported_and_ends_nothing(local, caplog):
    tracker = Blocking()
    background = begin(tracker, local, capacity=2)
    record_both(local, background, [0])
    tracker.entered.wait()
    record_both(local, background, range(1, 6))
    local.drain(20)
    local.tracker.write_text("no json\n" * 100)
    tracker.release.set()
    background.finish()
    assert [step for step, _ in logged(tracker)] == [0, 4, 5]
    assert (background.dropped, background.failures) == (3, 1)
    assert "is not JSON" in caplog.text


def test_each_tracker_gets_its_own_copy_of_values(local):
    class Taking(Recorder):
        def log(self, values, step, **kwargs):
            super().log(dict(values), step, **kwargs)
            values.clear()

    values = {"x": 1.0}
    trackers = [begin(Taking(), local) for _ in range(2)]
    for background in trackers:
        background.log_recorded(values, 1, 11.0)
        background.finish()
    assert [logged(one.wrapped) for one in trackers] == [[(1, "{'x': 1.0}")]] * 2


def test_a_run_id_that_is_not_known_yet_is_not_waited_for():
    class Late(Blocking):
        run = None

        @property
        def run_id(self):
            if self.run is None:
                raise AttributeError("no run")
            return self.run

    tracker = Late()
    background = started(tracker)
    background.log({}, 0)
    tracker.entered.wait()
    assert background.run_id is None  # or this would wait for an event that is set below
    tracker.run = "x"
    tracker.release.set()
    background.finish()
    assert background.run_id == "x"


def test_a_figure_that_cannot_be_drawn_is_left_out_and_reported(caplog):
    from matplotlib.figure import Figure

    figure = Figure()
    figure.suptitle(r"$\nothing{$")  # a formula that has no end
    tracker = Rich()
    background = started(tracker)
    background.store_init_configuration({"f": figure})
    background.log_figure({"f": figure}, 1)
    background.log({"f": figure}, 2)
    background.log({"loss": 1.0}, 3)
    background.finish()
    assert [call for call in tracker.calls if call[0] != "start"] == [
        ("log", {"loss": 1.0}, 3, {}),
        ("finish",),
    ]
    assert background.failures == 3  # none was tried again
    assert "cannot be copied or rendered" in caplog.messages[0]
    assert "Error" in caplog.text  # with matplotlib's own


def test_it_is_an_instance_of_its_trackers_class_too():
    background = BackgroundTracker(Recorder())
    assert isinstance(background, Recorder)
    assert isinstance(background, BackgroundTracker)
    assert not isinstance(background, Failing)
