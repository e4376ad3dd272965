"""Loggers that speak once, not once a process."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.ranks import RankError
from trainer.errors import module_logger
from trainer.logging import MultiProcessAdapter, get_logger
from trainer.state import PartialState


@pytest.fixture
def logger():
    """A logger of this test's own, whose level is put back."""
    adapter = get_logger("tests.logs")
    yield adapter
    adapter.logger.setLevel(logging.NOTSET)


def test_a_logger_needs_a_state(logger):
    for speak in (logger.info, logger.warning, logger.error, logger.warning_once):
        with pytest.raises(RuntimeError, match="an `Accelerator` or a `PartialState` before"):
            speak("hello")


def test_messages_are_the_users_own(logger, caplog):
    PartialState(cpu=True)
    with caplog.at_level(logging.INFO):
        logger.info("%s and %d", "one", 2, extra={"colour": "red"})
        logger.debug("not asked for")
    (record,) = caplog.records
    assert (record.name, record.levelname, record.getMessage()) == (
        "tests.logs",
        "INFO",
        "one and 2",
    )
    assert record.colour == "red"


def test_a_record_names_the_line_that_spoke(logger, caplog):
    PartialState(cpu=True)

    def helper() -> None:
        logger.warning("from the caller of helper", stacklevel=2)

    lines = []
    for speak in (
        lambda: logger.warning("a"),
        lambda: logger.log(logging.WARNING, "b"),
        lambda: logger.warning_once("c"),
        lambda: logger.error("d", main_process_only=False, in_order=True),
    ):
        speak()
        lines.append(speak.__code__.co_firstlineno)
    helper()
    # Below 3.11 Python counts a frame of `logging` itself as the caller of an adapter.
    own = helper.__code__.co_firstlineno + 1
    lines.append(sys._getframe().f_lineno - 3 if sys.version_info >= (3, 11) else own)
    assert [Path(record.pathname) for record in caplog.records] == [Path(__file__)] * 5
    assert [record.lineno for record in caplog.records] == lines


def test_an_exception_is_logged_with_its_traceback(logger, caplog):
    PartialState(cpu=True)
    try:
        raise LookupError("lost")
    except LookupError:
        logger.exception("went wrong")
    assert "LookupError: lost" in caplog.text


def test_a_warning_is_given_once(logger, caplog):
    PartialState(cpu=True)
    for _ in range(3):
        logger.warning_once("slow: %s", [1])  # not hashable
    logger.warning_once("slow: %s", [2])
    logger.warning("slow: %s", [1])
    assert caplog.messages == ["slow: [1]", "slow: [2]", "slow: [1]"]


def test_the_level_is_the_arguments_or_the_environments(monkeypatch, logger):
    root = logging.getLogger().level
    assert isinstance(get_logger("tests.logs"), MultiProcessAdapter)
    assert logger.logger.level == logging.NOTSET
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "")
    assert get_logger("tests.logs").logger.level == logging.NOTSET
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    assert get_logger("tests.logs").logger.level == logging.ERROR
    assert get_logger("tests.logs", "debug").logger.level == logging.DEBUG
    assert get_logger("tests.logs", log_level=logging.INFO).logger.level == logging.INFO
    assert logging.getLogger().level == root


def test_an_unknown_level_is_refused_where_it_came_from(monkeypatch):
    with pytest.raises(ValueError, match=r"log_level is 'INOF'.* Did you mean 'INFO'\?"):
        get_logger("tests.logs", "INOF")
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match=r"ACCELERATE_LOG_LEVEL is 'loud'; .* 'WARNING'"):
        get_logger("tests.logs")


def said(**kwargs: object) -> list[str]:
    """What each process writes into one file, in the order in which it arrived."""
    PartialState()
    logger = get_logger("tests.logs.ranks", "INFO")
    handler = logging.FileHandler("said")
    logger.logger.addHandler(handler)
    try:
        for turn in range(3):
            logger.info("%d by %d", turn, dist.get_rank(), **kwargs)
    finally:
        logger.logger.removeHandler(handler)
        handler.close()
    PartialState().wait_for_everyone()
    return Path("said").read_text().splitlines()


@pytest.mark.parametrize(
    ("options", "ranks_that_log"),
    [
        ({}, [0]),
        ({"in_order": True}, [0, 1]),
        ({"main_process_only": False}, [0, 1]),
        ({"main_process_only": False, "in_order": True}, [0, 1]),
    ],
)
def test_which_processes_log_and_in_which_order(ranks2, options, ranks_that_log):
    expected = [f"{turn} by {rank}" for turn in range(3) for rank in ranks_that_log]
    for lines in ranks2(lambda: said(**options)):
        ordered = "in_order" in options or len(ranks_that_log) == 1
        assert (lines if ordered else sorted(lines)) == expected


def test_levels_may_differ_where_processes_wait_for_each_other(ranks2):
    def speak() -> int:
        PartialState()
        level = "DEBUG" if dist.get_rank() else "ERROR"
        logger = get_logger("tests.logs.levels", level)
        logger.info("quiet on rank 0", main_process_only=False, in_order=True)
        return dist.get_rank()

    assert ranks2(speak) == [0, 1]


def test_an_error_in_one_turn_does_not_keep_the_others_waiting(ranks2):
    def speak() -> None:
        PartialState()
        logger = get_logger("tests.logs.errors", "INFO")

        def fail(record: logging.LogRecord) -> bool:
            raise LookupError("no filter")

        if dist.get_rank() == 0:
            logger.logger.addFilter(fail)
        try:
            logger.info("hello", main_process_only=False, in_order=True)
        finally:
            logger.logger.removeFilter(fail)

    with pytest.raises(RankError) as caught:
        ranks2(speak)
    assert list(caught.value.failures) == [0]
    assert "LookupError: no filter" in caught.value.failures[0]


def test_escape_sequences_in_warnings_are_made_visible(caplog):
    logger = module_logger("trainer.tests")
    logger.warning("%s is %s", "step\x1b[2J", 3)
    logger.warning("%s is %s", "plain", 3)
    first, second = caplog.records
    assert first.getMessage() == "step\\x1b[2J is 3"
    assert second.args == ("plain", 3)
