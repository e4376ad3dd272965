"""Silence the log of torch's agent: failures are reported once, when everything is known."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("torch.distributed.elastic", "torchelastic-events-null")


@contextmanager
def quiet_agent() -> Iterator[None]:
    """Inside, torch's launcher does not log: it raises the failure, which is reported once."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [each.propagate for each in loggers]
    nowhere = logging.NullHandler()
    for each in loggers:
        each.addHandler(nowhere)
        each.propagate = False
    try:
        yield
    finally:
        for each, propagate in zip(loggers, before, strict=True):
            each.propagate = propagate
            each.removeHandler(nowhere)
