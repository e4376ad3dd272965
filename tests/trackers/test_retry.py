import errno
import random

import pytest

from trackers.worker import may_pass, pause


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(),
        TimeoutError(),
        OSError(28, "No space left on device"),
        RuntimeError("the service has no words for it"),
        SystemExit(1),
        type("HTTPError", (OSError, ValueError), {})(),
    ],
)
def test_errors_that_are_retried(error):
    assert may_pass(error, "log")


@pytest.mark.parametrize(
    "error",
    [
        TypeError(),
        ValueError(),
        KeyError(),
        NotImplementedError(),
        OSError(errno.ENAMETOOLONG, "File name too long"),  # of an image, by its name
    ],
)
def test_errors_that_are_not_retried(error):
    assert not may_pass(error, "log")


def test_a_missing_file_to_upload_is_not_retried():
    assert not may_pass(FileNotFoundError(), "log_model")
    assert may_pass(FileNotFoundError(), "log")


def test_pauses_double_up_to_a_limit_and_leave_the_generator_of_the_training_alone():
    before = random.getstate()
    for attempt in range(1, 10_000, 7):
        full = min(60.0, 0.5 * 2.0 ** min(attempt - 1, 60))
        assert full / 2 <= pause(attempt, 0.5, 60.0) <= full
    assert random.getstate() == before
    assert len({pause(1, 1.0, 1.0) for _ in range(50)}) > 1
