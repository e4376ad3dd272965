"""Write predictions to files batch by batch, so that no process gathers all of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from callbacks.base import Callback
from trainer.checks import check_choice, suggest_arguments
from trainer.files import absolute_folder

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule

WriteInterval = Literal["batch", "epoch"]


class PredictionWriter(Callback):
    """Write the results of ``predict_step`` from each process, in the order of the loader.

    With this callback, ``Trainer.predict`` returns None unless ``return_predictions=True``. So only
    one batch is in memory, whatever the number of samples, and processes exchange only sizes.

    A prediction is a tensor, or nested containers of tensors, NumPy arrays and lists of plain
    values (such as texts), each with one row or entry per sample: tensors have shape `(N, ...)`.
    Tensors and arrays are written to ``*.safetensors``, under their keys joined by dots, or
    ``predictions`` if there is only one. Lists are written to ``*.jsonl``, one object per sample.
    Row *i* belongs to sample *i* of the loader, for any number of processes. Files appear only when
    they are complete; if the prediction fails, there are no merged files. With several loaders,
    each has its own folder, ``dataloader_idx_0`` and so on. With ``fast_dev_run`` nothing is
    written.

    Example::

        trainer = Trainer(callbacks=[PredictionWriter("predictions")])
        trainer.predict(module, test_loader)

    Args:
        dirpath: The folder, by default ``predictions`` in the Trainer's ``project_dir``.
        write_interval: ``"epoch"``: at the end, rank 0 merges all batches into
            ``predictions.safetensors`` and ``predictions.jsonl``. This requires a folder on a
            shared disk and rows of the same shape. ``"batch"``: each batch is written to
            ``batch-<number in the loader>.*`` and not merged.
        overwrite: Replace existing predictions in the folder.

    Attributes:
        directories: The folder of each loader of the latest prediction.

    Raises:
        ValueError: ``write_interval`` is invalid; in ``predict``, if the folder has predictions, or
            rows differ in shape.
        TypeError: In ``predict``, if a prediction contains a value of another type.
    """

    @suggest_arguments(output_dir="dirpath", write_on="write_interval")
    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        write_interval: WriteInterval = "epoch",
        overwrite: bool = False,
    ) -> None:
        check_choice("write_interval", write_interval, get_args(WriteInterval))
        self.dirpath = absolute_folder(dirpath)
        self.write_interval = write_interval
        self.overwrite = overwrite
        self.directories: list[Path] = []
        self._files: list[Any] = []

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Open the files of each loader."""
        self.directories = []
        if trainer.fast_dev_run:
            return
        folder = self.dirpath or trainer.project_dir / "predictions"
        loaders = len(trainer.num_eval_batches)
        self.directories = [
            folder / f"dataloader_idx_{index}" if loaders > 1 else folder
            for index in range(loaders)
        ]
        for directory in self.directories:
            self._files.append(
                trainer.open_predictions(
                    directory, merge=self.write_interval == "epoch", overwrite=self.overwrite
                )
            )

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write the predictions of one batch."""
        if self._files:
            engine = trainer.accelerator.engine
            number = batch_idx * engine.parallel.dp_size + engine.parallel.dp_rank
            self._files[dataloader_idx].add(outputs, number)

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Finish the files, and merge them for ``"epoch"``."""
        while self._files:
            self._files[0].finish()
            self._files.pop(0)

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Delete the incomplete files of a failed prediction."""
        while self._files:
            self._files.pop().discard()
