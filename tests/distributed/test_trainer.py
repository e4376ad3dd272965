"""The Trainer among several processes, where no process may wait for another in vain."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback
from tests.helpers import layouts
from tests.helpers.line import Line
from trainer import Accelerator, DataModule, DistributedDataParallelKwargs, Trainer
from trainer.distributed import guards


def loader(samples: int = 10) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(2.0 * samples).reshape(samples, 2)), batch_size=2)


def fit_again_after_a_failure(kwargs: dict[str, bool]) -> list[float]:
    class Failing(Line):
        fails = True

        def on_before_backward(self, loss):
            if self.fails and self.trainer.global_step == 1:
                raise MemoryError

    def make() -> Trainer:
        handler = DistributedDataParallelKwargs(**kwargs)
        return Trainer(max_epochs=1, cpu=True, progress_bar=False, kwargs_handlers=[handler])

    def gradient_in(step: str) -> None:
        raise MemoryError(step)

    module, trainers = Failing(), [make(), make(), make()]  # all of them stay
    with pytest.raises(MemoryError):
        trainers[0].fit(module, loader())
    Failing.fails = False
    handle = module.layer.weight.register_hook(lambda _: gradient_in("backward"))
    with pytest.raises(MemoryError, match="backward"):
        trainers[1].fit(module, loader())
    handle.remove()
    module.zero_grad()
    module.layer.load_state_dict({"weight": torch.ones(1, 2), "bias": torch.ones(1)})
    trainers[2].fit(module, loader())
    return module.layer.weight.flatten().tolist()


@pytest.mark.parametrize("kwargs", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_a_module_can_be_fitted_again_after_a_failed_backward(ranks2, kwargs):
    first, second = ranks2(fit_again_after_a_failure, kwargs)
    assert first == second


def every_entry_point(name: str) -> tuple[str, list[str]]:
    trainer = Trainer(max_epochs=1, cpu=True, progress_bar=False)
    if name == "fit":
        trainer.fit(Line(), loader(), loader())
    else:
        getattr(trainer, name)(Line(), loader())
    # Rank 0 may be about to remove the lock of the folder.
    return str(trainer.project_dir), sorted(each.name for each in trainer.project_dir.glob("[!.]*"))


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
def test_the_default_project_dir_is_the_same_on_all_ranks(ranks2, name):
    first, second = ranks2(every_entry_point, name, timeout=30)
    assert first == second
    assert ("metrics.jsonl" if name == "fit" else "evaluations.jsonl") in first[1]
    assert Path(first[0]).parent == Path("runs").absolute()


def weights_of_a_random_model(rank_seeds: bool) -> tuple[dict[str, float], dict[str, float]]:
    from trainer import PartialState

    torch.manual_seed(PartialState(cpu=True).process_index if rank_seeds else 0)
    module = Line()
    trainer = Trainer(cpu=True, progress_bar=False, project_dir="run")
    return trainer.validate(module, loader())[0], trainer.test(module, loader())[0]


def test_evaluation_uses_the_weights_of_rank_0(ranks2):
    same = ranks2(weights_of_a_random_model, False)
    other = ranks2(weights_of_a_random_model, True)
    assert other == same
    assert same[0][0] == same[0][1]


def stop_on_one_rank(rank: int) -> tuple[int, bool]:
    class Stopping(Line):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.trainer.accelerator.process_index == rank and self.global_step == 3:
                self.trainer.should_stop = True

    trainer = Trainer(max_epochs=5, cpu=True, progress_bar=False, checkpointing=False)
    trainer.fit(Stopping(), loader(40))
    return trainer.global_step, trainer.epoch_complete


@pytest.mark.parametrize("rank", [0, 1])
def test_should_stop_on_one_rank_ends_all_within_two_updates(ranks2, rank):
    first, second = ranks2(stop_on_one_rank, rank, timeout=30)
    assert first == second
    assert 3 <= first[0] <= 5


def stop_at_a_boundary(rank: int | None) -> tuple[int, list[bool]]:
    """Stop at the third boundary: on all ranks, or from another thread of one."""
    here = []

    class Stopping(Callback):
        def on_boundary(self, trainer, module):
            if rank is None:
                trainer.should_stop = trainer.global_step == 3
            elif trainer.accelerator.process_index == rank and trainer.global_step == 3:
                other = threading.Thread(target=setattr, args=(trainer, "should_stop", True))
                other.start()
                other.join()
                here.extend((trainer.should_stop, trainer.ending))

    trainer = Trainer(
        max_epochs=5, cpu=True, progress_bar=False, checkpointing=False, callbacks=[Stopping()]
    )
    trainer.fit(Line(), loader(40))
    return trainer.global_step, here


def test_a_stop_of_all_ranks_at_a_boundary_holds_at_once(ranks2):
    assert ranks2(stop_at_a_boundary, None, timeout=30) == [(3, []), (3, [])]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_of_one_rank_at_a_boundary_is_agreed_with_the_next_update(ranks2, rank):
    class Stopping(Callback):
        def on_boundary(self, trainer, module):
            if trainer.global_step in (3, 4) and trainer.accelerator.process_index == rank:
                trainer.should_stop = True
                ending.append((trainer.global_step, trainer.ending))

    ending = []

    def stop():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(guards, "_WARNED_AFTER", 0.2)  # how long the others are waited for
            options = {"cpu": True, "progress_bar": False, "checkpointing": False}
            trainer = Trainer(max_epochs=5, callbacks=[Stopping()], **options)
            trainer.fit(Line(), loader(40))
        return trainer.global_step, ending

    found = ranks2(stop, timeout=30)
    assert [steps for steps, _ in found] == [4, 4]
    assert found[rank][1] == [(3, False), (4, True)]
    assert found[1 - rank][1] == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_from_another_thread_at_a_boundary_is_agreed_with_the_next_update(ranks2, rank):
    found = ranks2(stop_at_a_boundary, rank, timeout=30)
    assert [steps for steps, _ in found] == [4, 4]
    assert found[rank][1] == [True, False]


def time_out_on_rank_0() -> int:
    trainer = Trainer(max_time="1 second", cpu=True, progress_bar=False, checkpointing=False)

    class Fast(Line):
        def on_train_batch_start(self, batch, batch_idx):
            # The clocks of the processes differ; rank 0's decides for all.
            if self.global_step == 4:
                run = self.trainer._run
                run.started -= 100.0 if self.trainer.accelerator.process_index == 0 else 0.0

    trainer.fit(Fast(), loader(40))
    return trainer.global_step


def test_max_time_is_decided_by_the_clock_of_rank_0(ranks2):
    first, second = ranks2(time_out_on_rank_0, timeout=30)
    assert first == second
    assert first <= 6


class TwoParts(Line):
    def __init__(self):
        super().__init__()
        self.other = torch.nn.Linear(2, 1)


def leave_a_part_out() -> None:
    trainer = Trainer(max_steps=1, cpu=True, progress_bar=False, checkpointing=False)
    trainer.fit(TwoParts(), loader())


def test_parameters_that_the_loss_leaves_out_are_named(ranks2):
    with pytest.raises(Exception, match=r"does not depend on other\.weight, other\.bias"):
        ranks2(leave_a_part_out, timeout=30)


def change_inside_an_epoch(unfreezes: bool) -> None:
    class Changing(TwoParts):
        def __init__(self):
            super().__init__()
            self.other.requires_grad_(not unfreezes)

        def on_train_batch_start(self, batch, batch_idx):
            self.other.requires_grad_(unfreezes == (self.global_step > 1))

        def training_step(self, batch, batch_idx):
            return (self.layer(batch[0]) + self.other(batch[0])).square().mean() * 1e-3

    trainer = Trainer(max_epochs=1, cpu=True, progress_bar=False, checkpointing=False)
    trainer.fit(Changing(), loader())


@pytest.mark.parametrize("unfreezes", [True, False])
def test_parameters_frozen_or_unfrozen_inside_an_epoch_are_named(ranks2, unfreezes):
    what = "unfrozen" if unfreezes else "frozen"
    said = rf"other\.bias .*were (added or )?{what},? inside an epoch.*on_train_epoch_start"
    with pytest.raises(Exception, match=said):
        ranks2(change_inside_an_epoch, unfreezes, timeout=30)


class Fractions(Line):
    def count_items(self, batch):
        return 0.3 * len(batch[0])


def count(kind: type[Line]) -> tuple[float, int]:
    trainer = Trainer(max_epochs=2, cpu=True, progress_bar=False, checkpointing=False)
    buckets = []

    class Looking(kind):
        def on_train_end(self):
            found = self.trainer._run.engine._ddp._get_ddp_logging_data()["bucket_sizes"]
            buckets.append(len(found.split(",")))

    trainer.fit(Looking(), loader(11))
    return trainer.items_seen, *buckets


def test_items_are_counted_within_the_gradient_reduction(ranks2, ranks3):
    for pool in (ranks2, ranks3):
        assert set(pool(count, Line, timeout=30)) == {(22.0, 1)}
        for items, buckets in pool(count, Fractions, timeout=30):
            assert items == pytest.approx(6.6, rel=1e-12)
            assert buckets == 2  # float32 holds no fractions exactly


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, values: list[float]):
        self.values = values

    def __iter__(self):
        for value in self.values:
            yield (torch.full((2,), value),)


def train_on_streams(streams: list[list[float]]) -> int:
    from trainer import PartialState

    values = streams[PartialState(cpu=True).process_index]
    trainer = Trainer(max_epochs=1, cpu=True, progress_bar=False, checkpointing=False)
    trainer.fit(Line(), DataLoader(Stream(values), batch_size=1))
    return trainer.samples_seen


def test_a_stream_is_sharded(ranks2):
    assert ranks2(train_on_streams, [[1.0, 2.0, 3.0]] * 2, timeout=30) == [3, 3]


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        ([[1.0] * 4, [1.0] * 8], "ended on 1 of 2 processes"),
        ([[1.0, 2.0], [3.0, 4.0]], "starts with a different batch on each process"),
    ],
)
def test_streams_that_differ_between_ranks_raise(ranks2, streams, message):
    with pytest.raises(Exception, match=message):
        ranks2(train_on_streams, streams, timeout=30)


def read_on_one_rank() -> int:
    class Reading(Line):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.trainer.accelerator.process_index == 0:
                assert self.trainer.items_seen == self.trainer.samples_seen
                assert self.trainer.project_dir.parent.name == "runs"

    trainer = Trainer(max_epochs=2, cpu=True, progress_bar=False, checkpointing=False)
    trainer.fit(Reading(), loader())
    return trainer.global_step


def test_one_rank_alone_may_read_the_trainer_state(ranks2):
    assert ranks2(read_on_one_rank, timeout=30) == [6, 6]


def dropout_masks(seed: int | None) -> list[float]:
    class Dropping(Line):
        drawn: list[float] = []

        def training_step(self, batch, batch_idx):
            self.drawn.append(float(torch.rand(())))
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    trainer = Trainer(max_steps=2, cpu=True, progress_bar=False, checkpointing=False, seed=seed)
    trainer.fit(Dropping(), loader())
    return Dropping.drawn


@pytest.mark.parametrize("seed", [None, 3])
def test_ranks_draw_different_random_numbers(ranks2, seed):
    first, second = ranks2(dropout_masks, seed, timeout=30)
    assert set(first).isdisjoint(second)


class Fragile(Line):
    """A hook of its set-up fails on rank 1; the hooks may have a collective of their own."""

    def __init__(self, fails: str, collective: bool):
        super().__init__()
        self.fails, self.collective = fails, collective

    def reached(self, hook: str) -> None:
        if hook == self.fails and self.trainer.global_rank == 1:
            raise LookupError(f"in {hook}")
        if self.collective:
            self.trainer.accelerator.wait_for_everyone()

    def setup(self, stage):
        self.reached("setup")

    def configure_model(self):
        self.reached("configure_model")

    def configure_optimizers(self):
        self.reached("configure_optimizers")
        return super().configure_optimizers()

    def test_step(self, batch, batch_idx):
        self.log("test", 1.0)


class Part(Callback):
    def setup(self, trainer, module, stage):
        module.reached("a callback")


class Source(DataModule):
    def __init__(self, module: Fragile):
        super().__init__()
        self.module = module

    def setup(self, stage):
        self.module.reached("the datamodule")

    def train_dataloader(self):
        return loader()

    test_dataloader = train_dataloader


def set_up(entry: str, *how) -> str:
    trainer = Trainer(
        max_epochs=1, cpu=True, progress_bar=False, checkpointing=False, callbacks=Part()
    )
    module = Fragile(*how)
    try:
        getattr(trainer, entry)(module, datamodule=Source(module))
    except (LookupError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("entry", "hook"),
    [
        *(("fit", hook) for hook in ("the datamodule", "a callback", "configure_optimizers")),
        ("test", "configure_model"),
    ],
)
def test_a_set_up_hook_that_fails_on_one_rank_raises_on_all(ranks2, entry, hook):
    other, failed = ranks2(set_up, entry, hook, False, timeout=20)
    assert failed == f"LookupError: in {hook}"
    assert other.endswith(f"Rank 1 failed while the others waited for it: {failed}")


@pytest.mark.parametrize("hook", ["setup", "configure_optimizers"])
def test_a_set_up_hook_that_fails_while_others_wait_in_it_raises_on_all(ranks2, hook):
    other, failed = ranks2(set_up, "fit", hook, True, timeout=20)
    assert failed == f"LookupError: in {hook}"
    assert other.startswith("DistributedOperationException: ")
    assert "rank 0: wait_for_everyone" in other
    assert "rank 1: fit" in other


class Views(Line):
    """Its buffers and parameters have every memory layout."""

    def __init__(self, rank: int, *, automatic: bool = True):
        super().__init__()
        self.automatic_optimization = automatic
        self.views = torch.nn.ParameterDict()
        self.frozen = torch.nn.ParameterDict()
        for number, (layout, view) in enumerate(layouts.LAYOUTS.items()):
            for name, tensor in layouts.tensors(layout, rank).items():
                self.register_buffer(f"{number}_{name.removeprefix('torch.')}", tensor)
            values = torch.full((4, 6), 1.0 + rank)
            self.frozen[str(number)] = torch.nn.Parameter(view(values), requires_grad=False)
            self.views[str(number)] = torch.nn.Parameter(view(values))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss = loss + sum((view.square().sum() for view in self.views.values()), torch.zeros(()))
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def forward(self, x):
        return self.layer(x)

    def wrong(self) -> list[str]:
        """Return the names of the buffers that are not those of rank 0."""
        found = dict(self.named_buffers())
        return [
            f"{layout} {name}"
            for number, layout in enumerate(layouts.LAYOUTS)
            for name, expected in layouts.bits(layout, 0).items()
            if not torch.equal(
                layouts.bits_of(found[f"{number}_{name.removeprefix('torch.')}"]), expected
            )
        ]


@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # of DDP, for what has one row
@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_modules_with_tensors_of_any_memory_layout(ranks, size, automatic):
    def run(automatic: bool) -> list[Any]:
        rank = torch.distributed.get_rank()
        settings = {"cpu": True, "progress_bar": False, "project_dir": "run", "max_epochs": 1}
        module = Views(rank, automatic=automatic)
        trainer = Trainer(**settings)
        trainer.validate(module, loader())
        trainer.predict(module, loader())
        wrong = [*module.wrong()]
        module = Views(rank, automatic=automatic)
        Trainer(**settings).fit(module, loader(), loader())
        wrong += module.wrong()
        again = Views(1, automatic=automatic)
        Trainer(**settings | {"max_epochs": 2}).fit(again, loader(), ckpt_path="last")
        wrong += again.wrong()
        return [wrong, [view.flatten().tolist() for view in again.views.values()]]

    found = ranks(size)(run, automatic)
    assert [wrong for wrong, _ in found] == [[]] * size
    assert found[0] == found[-1]


def test_prepared_models_with_tensors_of_any_memory_layout(ranks2):
    def run() -> list[str]:
        accelerator = Accelerator(cpu=True)
        module = Views(accelerator.process_index)
        model = accelerator.prepare(module)
        model(torch.ones(1, 2))
        accelerator.save_state("state")
        accelerator.save_model(model, "weights")
        wrong = module.wrong()
        for view in module.buffers():
            view.zero_()
        accelerator.load_state("state")
        return wrong + module.wrong()

    assert ranks2(run) == [[], []]


class Latest(Callback):
    """What `callback_metrics` shows of a metric that nothing records, at every turn."""

    monitor = "x"

    def __init__(self):
        self.seen = []

    def monitor_due(self, trainer):
        return trainer.global_step == 2

    def on_boundary(self, trainer, module):
        self.seen.append(("boundary", trainer.callback_metrics.get("x")))

    def on_train_batch_end(self, trainer, *_):
        self.seen.append(("batch", trainer.callback_metrics["x"]))

    def on_train_epoch_end(self, trainer, module):
        self.seen.append(("epoch", trainer.callback_metrics["x"]))


def latest_values() -> list[tuple[str, float | None]]:
    class Ranked(Line):
        def training_step(self, batch, batch_idx):
            self.log("x", 10.0 * batch_idx + self.global_rank)
            return super().training_step(batch, batch_idx)

    latest = Latest()
    trainer = Trainer(
        max_epochs=1, cpu=True, progress_bar=False, checkpointing=False, callbacks=[latest]
    )
    trainer.fit(Ranked(), loader(12))
    assert trainer.global_step == 3
    return latest.seen


def test_callback_metrics_are_local_until_they_are_reduced(ranks2):
    expected = [
        [
            ("batch", 0.0 + rank),
            ("boundary", None),  # where all decide alike, and none was reduced
            ("batch", 10.0 + rank),
            ("boundary", 10.5),
            ("batch", 20.0 + rank),
            ("epoch", 20.5),
            ("boundary", 20.5),
        ]
        for rank in range(2)
    ]
    assert ranks2(latest_values) == expected
