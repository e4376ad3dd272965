"""Log one run to several trackers at once: curves, images, tables, figures, files.

The digits of ``examples/digits.py`` go to a CSV table, TensorBoard, Weights & Biases and Comet, all
offline, and to a custom tracker that keeps a diary in Markdown. They write nothing outside
``--project-dir``. ``--trackers`` selects some of them.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

from callbacks import Callback, ModelCheckpoint
from trackers import CometMLTracker, GeneralTracker, WandBTracker, register_tracker
from trainer import Trainer, TrainModule
from trainer.utils import patch_environment

ALL = ("csv", "tensorboard", "wandb", "comet_ml", "diary")


@register_tracker
class Diary(GeneralTracker):
    """A custom tracker: writes a line of Markdown for everything that is logged.

    Kinds that it has no method for, such as images, are left out. Every method runs on the
    tracker's own thread, so that training does not wait for the disk.
    """

    name = "diary"
    requires_logging_directory = True

    def __init__(self, run_name, logging_dir):
        self.path = Path(logging_dir, run_name, "diary.md")

    @property
    def tracker(self):
        return self.path

    def start(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(f"# {self.path.parent.name}\n\n")

    def log(self, values, step, **kwargs):
        self._write(step, ", ".join(f"{name} **{value:.4g}**" for name, value in values.items()))

    def log_text(self, values, step, **kwargs):
        for name, text in values.items():
            self._write(step, f"{name}: {text}")

    def finish(self):
        with self.path.open("a") as diary:
            diary.write(f"\nThe run has {self.status}.\n")  # finished, failed or preempted

    def _write(self, step, text):
        with self.path.open("a") as diary:
            diary.write(f"- step {step}: {text}\n")


class Digits(TrainModule):
    """A multilayer perceptron for images of 8 × 8 pixels."""

    def __init__(self, width=64, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()  # every tracker stores them
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(64, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, 10),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/accuracy", (self.net(x).argmax(-1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Pictures(Callback):
    """Log a weight histogram after each epoch, and images, a table and more after training.

    ``trainer.trackers`` is empty on processes that do not write, so no check of the rank is needed.
    A tracker leaves out what it does not support and warns once.
    """

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def on_train_epoch_end(self, trainer, module):
        for tracker in trainer.trackers:
            tracker.log_histogram({"weights/first": module.net[1].weight}, trainer.global_step)

    def on_train_end(self, trainer, module):
        trainer.wait_for_save()  # checkpoints are written in the background
        best = next(one for one in trainer.callbacks if isinstance(one, ModelCheckpoint))
        with torch.no_grad():
            guesses = module.net(self.images.to(module.device)).argmax(-1).cpu()
        wrong = guesses != self.labels
        confusion = torch.zeros(10, 10, dtype=torch.int64)
        confusion.index_put_((self.labels, guesses), torch.tensor(1), accumulate=True)
        step = trainer.global_step
        for tracker in trainer.trackers:
            # One channel, enlarged 8 times; there may be no misread image.
            if wrong.any():
                samples = self.images[wrong][:8, None].repeat_interleave(8, 2)
                tracker.log_images({"misread": samples.repeat_interleave(8, 3)}, step)
            columns = ["digit", *map(str, range(10))]
            rows = [[digit, *row] for digit, row in enumerate(confusion.tolist())]
            tracker.log_table("confusion", columns, rows, step=step)
            tracker.log_text({"summary": f"{int(wrong.sum())} of {len(wrong)} misread"}, step)
            tracker.log_model(best.best_model_path, step=step)
            if importlib.util.find_spec("matplotlib"):
                tracker.log_figure({"confusion/figure": figure_of(confusion)}, step)


def figure_of(confusion):
    """Return a heat map, made without pyplot, which would keep a reference to it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="guess", ylabel="digit", xticks=range(10), yticks=range(10))
    axes.imshow(confusion.log1p().numpy(), cmap="Blues")
    for digit, guess in confusion.nonzero().tolist():
        count = int(confusion[digit, guess])
        colour = "white" if count > 9 else "black"
        axes.text(guess, digit, count, ha="center", va="center", color=colour)
    return figure


def trackers_of(names, folder):
    """Return the value for `log_with`: names, or instances where arguments are needed."""
    services = {
        "wandb": lambda: WandBTracker(
            folder.name, mode="offline", dir=folder, settings={"silent": True}
        ),
        "comet_ml": lambda: CometMLTracker(
            folder.name, online=False, offline_directory=str(folder / "comet")
        ),
    }
    return [services[name]() if name in services else name for name in names]


def load_data():
    """Return the images, scaled to [0, 1], four fifths of them for training."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 16
    dataset = TensorDataset(images, torch.tensor(labels))
    return random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0))


def show(print_, folder, names):
    """Print where each tracker wrote, or the command that shows it."""
    run = folder / "logs" / folder.name
    where = {
        "csv": f"{run / 'metrics.csv'}",
        "tensorboard": f"tensorboard --logdir {folder / 'logs'}",
        "wandb": f"wandb sync {folder / 'wandb'}/offline-run-*",
        "comet_ml": f"comet upload {folder / 'comet'}/*.zip",
        "diary": f"{run / 'diary.md'}",
    }
    print_(f"{'always':12}{folder / 'metrics.jsonl'}, or: trainer watch {folder}")
    for name in names:
        print_(f"{name:12}{where[name]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project-dir", type=Path, default=Path("runs/trackers"))
    parser.add_argument("--trackers", nargs="+", choices=ALL, default=ALL, metavar="NAME")
    parser.add_argument("--max-epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    arguments = parser.parse_args()
    folder = arguments.project_dir.absolute()

    train_set, val_set = load_data()
    images, labels = val_set.dataset[val_set.indices]
    trainer = Trainer(
        max_epochs=arguments.max_epochs,
        seed=0,
        log_every=5,
        log_with=trackers_of(arguments.trackers, folder),
        project_dir=folder,
        progress_bar=False,
        callbacks=[ModelCheckpoint(monitor="val/accuracy", mode="max"), Pictures(images, labels)],
    )
    # W&B copies the files to upload; by default these copies and its logs go to the home folder.
    own = str(folder / "wandb" / "own")
    with patch_environment(wandb_data_dir=own, wandb_cache_dir=own):
        trainer.fit(
            Digits(),
            DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True),
            DataLoader(val_set, batch_size=256),
            ckpt_path="auto",
        )
    trainer.accelerator.print(f"accuracy    {trainer.callback_metrics['val/accuracy']:.4f}")
    show(trainer.accelerator.print, arguments.project_dir, arguments.trackers)


if __name__ == "__main__":
    main()
