"""The Trainer among several processes, where no process may wait for another in vain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer import Trainer, TrainModule


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("score", self.layer(batch[0]).mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(samples: int = 10) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(2.0 * samples).reshape(samples, 2)), batch_size=2)


def every_entry_point(name: str) -> tuple[str, list[str]]:
    trainer = Trainer(max_epochs=1, cpu=True, progress_bar=False)
    if name == "fit":
        trainer.fit(Line(), loader(), loader())
    else:
        getattr(trainer, name)(Line(), loader())
    return str(trainer.project_dir), sorted(path.name for path in trainer.project_dir.iterdir())


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
def test_a_folder_that_nobody_named_is_the_same_on_all_processes(ranks2, name):
    first, second = ranks2(every_entry_point, name, timeout=30)
    assert first == second
    assert "metrics.jsonl" in first[1]
    assert Path(first[0]).parent == Path("runs")


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
def test_a_stop_asked_of_one_process_is_agreed_within_two_updates(ranks2, rank):
    first, second = ranks2(stop_on_one_rank, rank, timeout=30)
    assert first == second
    assert 3 <= first[0] <= 5


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


def test_the_clock_of_rank_0_ends_the_run_for_all(ranks2):
    first, second = ranks2(time_out_on_rank_0, timeout=30)
    assert first == second
    assert first <= 6


def log_on_one_rank() -> None:
    class Lonely(Line):
        def training_step(self, batch, batch_idx):
            if self.trainer.accelerator.process_index == 1:
                self.log("lonely", 1.0)
            return super().training_step(batch, batch_idx)

    trainer = Trainer(max_epochs=1, cpu=True, progress_bar=False, checkpointing=False, log_every=1)
    trainer.fit(Lonely(), loader())


def test_a_metric_logged_on_one_rank_only_names_rank_and_metric(ranks2):
    with pytest.raises(Exception, match=r"Rank 0 did not log 'lonely'.*but rank 1 did"):
        ranks2(log_on_one_rank, timeout=30)
