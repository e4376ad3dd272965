from __future__ import annotations

import gc
import weakref

import pytest

from callbacks import GarbageCollection, LambdaCallback
from tests.helpers.line import Line, loader
from tests.numerics.running import quiet_trainer


@pytest.fixture(autouse=True)
def collection_put_back():
    yield
    gc.enable()


class Cycle:
    def __init__(self):
        self.itself = self


def alive_after_each_update(collector, samples=24, **options):
    """How many of the cycles that each update leaves are there at its end, and is gc on?"""
    left, seen = [], []

    def leave(trainer, module):
        left.append(weakref.ref(Cycle()))

    def look(trainer, module):
        seen.append((sum(reference() is not None for reference in left), gc.isenabled()))

    leaving = LambdaCallback(on_train_step_start=leave)
    looking = LambdaCallback(on_boundary=look)
    trainer = quiet_trainer(
        max_epochs=1, callbacks=[leaving, collector, looking], log_every=1000, **options
    )
    trainer.fit(Line(), loader(samples))
    return seen


def test_garbage_is_collected_at_the_interval_only():
    seen = alive_after_each_update(GarbageCollection("4 steps"))
    off = False
    assert seen == [(n, off) for n in (1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0)]
    assert gc.isenabled()


def test_a_younger_generation_is_enough_for_young_cycles():
    seen = alive_after_each_update(GarbageCollection(6, generation=0))
    assert [count for count, _ in seen] == [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0]


def test_it_collects_once_before_the_first_update():
    early = weakref.ref(Cycle())
    seen = []
    look = LambdaCallback(on_train_epoch_start=lambda *_: seen.append(early() is None))
    quiet_trainer(max_epochs=1, callbacks=[GarbageCollection(), look]).fit(Line(), loader(2))
    assert seen == [True]


@pytest.mark.parametrize("enabled", [True, False])
def test_gc_is_restored_after_an_error(enabled):
    def fail(trainer, module):
        assert not gc.isenabled()
        raise ZeroDivisionError

    if not enabled:
        gc.disable()
    collector = GarbageCollection()
    with pytest.raises(ZeroDivisionError):
        quiet_trainer(max_epochs=1, callbacks=[collector, LambdaCallback(on_boundary=fail)]).fit(
            Line(), loader(2)
        )
    assert gc.isenabled() == enabled
    gc.enable()
    quiet_trainer(callbacks=collector).validate(Line(), loader(2))
    assert gc.isenabled()


def collecting_steps():
    steps = []
    watch = lambda phase, info: steps.append(trainer.global_step) if phase == "start" else None
    trainer = quiet_trainer(max_epochs=2, callbacks=GarbageCollection("3 steps"))
    gc.callbacks.append(watch)
    try:
        trainer.fit(Line(), loader(20))
    finally:
        gc.callbacks.remove(watch)
    return [step for step in steps if 0 < step < trainer.global_step]


def test_all_ranks_collect_at_the_same_update(ranks2):
    # Neither in between nor at the end, where it is on again.
    assert ranks2(collecting_steps, timeout=60) == [[3, 6, 9]] * 2


def test_a_resumed_run_collects_where_the_whole_one_does():
    steps = []

    class Noting(GarbageCollection):
        def on_boundary(self, trainer, module):
            begun = []
            gc.callbacks.append(lambda phase, info: begun.append(phase))
            super().on_boundary(trainer, module)
            gc.callbacks.pop()
            if begun:
                steps.append(trainer.global_step)

    for length in (4, 10):
        trainer = quiet_trainer(max_steps=length, callbacks=Noting("3 steps"), checkpointing=True)
        trainer.fit(Line(), loader(24), ckpt_path="auto")
    assert steps == [3, 6, 9]
