"""A trigger set on one process is seen by all, once."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from trainer.distributed.collectives import Trigger


@pytest.mark.parametrize("setters", [{1}, {0, 2}, {0, 1, 2}])
def test_all_see_what_any_has_set_and_only_once(ranks3, setters):
    def look() -> list[bool]:
        trigger = Trigger()
        seen = [trigger.check()]
        if dist.get_rank() in setters:
            trigger.set()
            trigger.set()
        seen += [trigger.check(), trigger.check()]
        if dist.get_rank() == 2:
            trigger.set()
        return [*seen, trigger.check(), trigger.check()]

    assert ranks3(look) == [[False, True, False, True, False]] * 3


def test_triggers_do_not_meet(ranks2):
    def look() -> list[bool]:
        one, other = Trigger(), Trigger()
        if dist.get_rank() == 1:
            one.set()
        return [other.check(), one.check()]

    assert ranks2(look) == [[False, True]] * 2


def test_one_process_sees_its_own():
    trigger = Trigger()
    assert not trigger.check()
    trigger.set()
    assert trigger.check() is True
    assert trigger.check() is False
