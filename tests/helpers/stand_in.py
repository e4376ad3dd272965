"""A trainer without a loop: the attributes that callbacks read, set directly by their tests."""

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from callbacks import Callback, Progress


@dataclass
class AcceleratorStandIn:
    is_main_process: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    printed: list[str] = field(default_factory=list)

    def print(self, text: str) -> None:
        self.printed.append(text)

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        return tensor


@dataclass
class ModuleStandIn:
    logged: dict[str, Any] = field(default_factory=dict)

    def log(self, name: str, value: Any, *, on_step: bool, on_epoch: bool, **how: object) -> None:
        assert on_step
        assert not on_epoch
        self.logged[name] = value


@dataclass
class TrainerStandIn:
    checkpoint_dir: Path = Path("nowhere")
    project_dir: Path = Path("nowhere")
    callbacks: list[Callback] = field(default_factory=list)
    accelerator: AcceleratorStandIn = field(default_factory=AcceleratorStandIn)
    module: ModuleStandIn = field(default_factory=ModuleStandIn)
    steps_per_epoch: int = 10
    global_step: int = 0
    keeps_checkpoints: bool = True
    seconds: float = 0.0
    max_epochs: int | None = None
    num_training_batches: int | None = 10
    num_eval_batches: list[int | None] = field(default_factory=list)
    callback_metrics: dict[str, float] = field(default_factory=dict)
    metric_updates: dict[str, int] = field(default_factory=dict)
    logged_names: set[str] = field(default_factory=set)
    bar_values: dict[str, float] = field(default_factory=dict)
    bar_values_read: int = 0
    validations: int = 0
    has_validation: bool = False
    should_stop: bool = False
    fast_dev_run: bool = False
    sanity_checking: bool = False
    log_due: bool = True
    optimizers: list[Any] = field(default_factory=list)
    optimizer_names: list[str] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    states: dict[str, list[Any]] = field(default_factory=dict)  # by checkpoint name
    kinds: dict[str, tuple[bool, bool, bool]] = field(default_factory=dict)
    saved: bool = True
    space_asked: list[Path] = field(default_factory=list)
    waits: int = 0
    fail_saves: set[str] = field(default_factory=set)
    fail_at_removal: bool = False

    def monitored_metric(self, name: str) -> tuple[float, int] | None:
        known = name in self.callback_metrics
        return (self.callback_metrics[name], self.metric_updates[name]) if known else None

    @property
    def batches_seen(self) -> int:
        return self.global_step

    @property
    def current_epoch(self) -> int:
        return max(self.global_step - 1, 0) // self.steps_per_epoch

    @property
    def epoch_complete(self) -> bool:
        return self.global_step > 0 and self.global_step % self.steps_per_epoch == 0

    @property
    def progress(self) -> Progress:
        step = self.global_step
        return Progress(step, step / self.steps_per_epoch, step * 32.0, self.seconds)

    def progress_values(self, *, wait: bool = False) -> dict[str, float]:
        self.bar_values_read += 1
        return self.bar_values

    def save_checkpoint(
        self,
        path: Path,
        *,
        weights_only: bool = False,
        background: bool = False,
        required: bool = True,
        links: Any = None,
        displaces: Sequence[Path] = (),
    ) -> Path | None:
        self.kinds[path.name] = (weights_only, background, required)
        self.saved = path.name not in self.fail_saves
        if not self.saved:
            return path if background else None
        self.states[path.name] = json.loads(json.dumps([c.state_dict() for c in self.callbacks]))
        path.mkdir(parents=True)
        for displaced in displaces:
            self.remove_checkpoint(displaced)
        return path

    def require_space(self, folder: Path) -> None:
        self.space_asked.append(folder)

    def wait_for_save(self, path: Any = None) -> bool:
        self.waits += 1
        return self.saved

    def remove_checkpoint(self, path: Path) -> None:
        if self.fail_at_removal:
            raise ProcessLookupError("killed")
        shutil.rmtree(path)

    def resume(self, name: str) -> None:
        """Load the callbacks' states from the checkpoint ``name``, as a new process does."""
        self.global_step = int(name.removeprefix("step-"))
        for callback, state in zip(self.callbacks, self.states[name], strict=True):
            callback.load_state_dict(state)

    def start(self) -> None:
        for callback in self.callbacks:
            callback.setup(self, self.module, "fit")
        for callback in self.callbacks:
            callback.on_train_start(self, self.module)

    def update(self, **metrics: float) -> None:
        """Make one update, at whose boundary ``metrics`` were reduced."""
        self.global_step += 1
        for name, value in metrics.items():
            self.callback_metrics[name] = value
            self.metric_updates[name] = self.global_step
        for callback in self.callbacks:
            callback.on_boundary(self, self.module)

    def updates(self, values: Iterable[float | None], name: str = "loss") -> None:
        """Make one update per value; None is an update without a new value."""
        for value in values:
            self.update(**({} if value is None else {name: value}))

    def end(self) -> None:
        for callback in self.callbacks:
            callback.on_train_end(self, self.module)

    def on_disk(self) -> list[str]:
        return sorted(path.name for path in self.checkpoint_dir.glob("*"))
