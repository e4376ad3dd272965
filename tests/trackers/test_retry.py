import errno
import random

import pytest

from trackers.worker import is_retryable, pause


@pytest.mark.parametrize(
    ("error", "method", "retried"),
    [
        (ConnectionRefusedError(), "log", True),
        (OSError(errno.ENOSPC, "No space left on device"), "log", True),
        (RuntimeError("an error of the SDK"), "log", True),
        (SystemExit(1), "log", True),
        (type("HTTPError", (OSError, ValueError), {})(), "log", True),
        (TypeError(), "log", False),
        (NotImplementedError(), "log", False),
        (OSError(errno.ENAMETOOLONG, "File name too long"), "log", False),  # of an image
        (FileNotFoundError(), "log", True),
        (FileNotFoundError(), "log_model", False),
    ],
)
def test_errors_that_may_pass_are_retried(error, method, retried):
    assert is_retryable(error, method) == retried


def test_pauses_double_up_to_a_limit_and_leave_the_generator_of_the_training_alone():
    before = random.getstate()
    for attempt in range(1, 10_000, 7):
        full = min(60.0, 0.5 * 2.0 ** min(attempt - 1, 60))
        assert full / 2 <= pause(attempt, 0.5, 60.0) <= full
    assert random.getstate() == before
    assert len({pause(1, 1.0, 1.0) for _ in range(50)}) > 1
