"""Fixtures of the callbacks' tests."""

from collections.abc import Iterator

import pytest

from tests.helpers.terminal import Terminal


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    terminal = Terminal(monkeypatch)
    yield terminal
    terminal.close()
