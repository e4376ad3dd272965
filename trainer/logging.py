"""Loggers whose messages appear once, not once per process."""

from __future__ import annotations

import logging
from typing import Any

from trainer import environment
from trainer.checks import choice_error
from trainer.state import PartialState

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]  # generic from 3.11 on
    """A logger whose records come from the main process, unless a call says otherwise.

    Every logging method has two more arguments:

    - ``main_process_only=True``: False logs on every process.
    - ``in_order=False``: True, with ``main_process_only=False``, makes the processes log one after
      the other. They wait for each other, so every process must make the call, whatever its level.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._logged: set[tuple[str, ...]] = set()

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log on the main process, on all processes, or on all in order of rank.

        Args:
            level: A level of the ``logging`` module.
            msg: The message, with placeholders for `args`.
            *args: The arguments of the message.
            **kwargs: Arguments of ``logging.Logger.log``, `main_process_only` (True by default) and
                `in_order`, which logs on all processes whatever `main_process_only` is; every
                process must make that call.

        Raises:
            RuntimeError: There is no `Accelerator` or `PartialState` yet, so the rank is unknown.
        """
        if not PartialState._shared_state:
            raise RuntimeError(
                "This logger does not know its process's rank yet: create an `Accelerator` or a "
                "`PartialState` before the first message."
            )
        state = PartialState()
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller's line, not this one
        if not in_order:
            if state.is_main_process or not main_process_only:
                self.logger.log(level, msg, *args, **kwargs)
            return
        error: BaseException | None = None
        for turn in range(state.num_processes):
            if turn == state.process_index:
                try:
                    self.logger.log(level, msg, *args, **kwargs)
                except BaseException as caught:  # noqa: BLE001 - raised after every rank's turn
                    error = caught
            state.wait_for_everyone()
        if error is not None:
            raise error

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """``warning``, unless this logger has already logged the same message."""
        message = (str(msg), *map(repr, args))
        if message not in self._logged:
            self._logged.add(message)
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            self.log(logging.WARNING, msg, *args, **kwargs)


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """Return the logger of this name, which logs on the main process only by default.

    Example::

        logger = get_logger(__name__, log_level="INFO")
        accelerator = Accelerator()  # before the first message
        logger.info("The run begins.")
        logger.info("Data is ready.", main_process_only=False)  # on every process

    Args:
        name: Usually ``__name__``.
        log_level: ``"DEBUG"``, ``"INFO"``, ``"WARNING"``, ``"ERROR"``, ``"CRITICAL"`` in any case,
            or a number; None takes ``ACCELERATE_LOG_LEVEL``, else keeps the logger's level. Only
            this logger's level is set, not the root logger's.

    Raises:
        ValueError: The level is unknown.
    """
    what = "log_level"
    if log_level is None:
        what = "ACCELERATE_LOG_LEVEL"
        log_level = environment.read(what) or None
    logger = logging.getLogger(name)
    if isinstance(log_level, str):
        if log_level.upper() not in _LEVELS:
            raise ValueError(choice_error(what, log_level, _LEVELS))
        log_level = log_level.upper()
    if log_level is not None:
        logger.setLevel(log_level)
    return MultiProcessAdapter(logger)
