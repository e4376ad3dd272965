"""Runs of one tracker in a process of its own, for SDKs that leave threads and hooks behind.

``python -m tests.helpers.service_runs <what> <name> <folder>`` writes ``<folder>/<what>.json``.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trackers import BackgroundTracker, resolve_trackers
from trainer import Trainer, TrainModule

# A service that is not there, or a disk that refuses, for each tracker.
ABSENT: dict[str, dict[str, Any]] = {
    "aim": {"repo": "aim://127.0.0.1:9"},
    "clearml": {},  # without CLEARML_OFFLINE_MODE
    "dvclive": {"dir": "/dev/null/dvclive"},
    "swanlab": {"mode": "online", "settings": None},
    "trackio": {"server_url": "http://127.0.0.1:9/?write_token=x"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "aim": {"system_tracking_interval": None},
    "clearml": {"auto_resource_monitoring": False},
    "dvclive": {},
    "swanlab": {"mode": "offline"},
    "trackio": {"auto_log_cpu": False, "auto_log_gpu": False},
}


def tracker_of(name: str, folder: Path, **options: Any) -> BackgroundTracker:
    (tracker,) = resolve_trackers(
        name,
        project_name="project",
        run_name="first",
        logging_dir=folder / "logs",
        init_kwargs={name: {**OPTIONS[name], **options}},
    )
    return BackgroundTracker(tracker, finish_timeout=120)


def image() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 255, (2, 3, 32, 48), dtype=np.uint8)


def record(name: str, folder: Path) -> dict[str, Any]:
    """Log everything; then a killed run's last checkpoint is that of update 2, and it resumes."""
    checkpoint = folder / "step-00000002"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"weights")

    def states() -> tuple[object, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before, hooks = states(), sys.excepthook
    first = tracker_of(name, folder)
    first.start()
    first.store_init_configuration({"lr": 0.1, "model": {"dtype": torch.float32, "none": None}})
    for step in (1, 2, 3, 4):
        first.log({"train/loss": torch.tensor(float(step))}, step)
    first.log({"note": "a text", "parts": {"a": 1}}, 4)
    first.log_images({"batch": image(), "one": torch.as_tensor(image()[0])}, 3)
    first.log_table("table", columns=["a", "b"], data=[["x", torch.tensor(1)], ["y", 2]], step=3)
    first.log_text({"sample": "once upon"}, 3)
    first.log_histogram({"weights": torch.arange(10.0)}, 3)
    first.log_artifact(checkpoint / "model.safetensors", step=2)
    first.log_model(checkpoint, step=2)
    first.drain(120)
    one = {"failures": first.failures, "id": first.run_id}
    first.finish()
    (checkpoint / "model.safetensors").unlink()  # a later checkpoint takes its place

    second = tracker_of(name, folder)
    second.resume(first.run_id, 2)
    second.start()
    second.store_init_configuration({"lr": 0.2})
    for step in (3, 4, 5):
        second.log({"train/loss": 10.0 * step}, step)
    second.finish()
    two = {"failures": second.failures, "id": second.run_id}
    return {
        "starts": [one, two],
        "dropped": first.dropped + second.dropped,
        "generators": states() == before,
        "excepthook": sys.excepthook is hooks,
        "runs": READERS[name](folder),
    }


def fit(name: str, folder: Path) -> dict[str, Any]:
    """Train with a service that is not there."""
    chosen = None if name == "none" else tracker_of(name, folder, **ABSENT[name])
    if chosen is not None:
        chosen.finish_timeout = 5

    class Line(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(3, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.net(batch[0]).square().mean()
            self.log("train/loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4)
    trainer = Trainer(
        max_epochs=2,
        seed=0,
        log_every=1,
        log_with=None if chosen is None else chosen.wrapped,
        project_dir=folder / name,
        progress_bar=False,
        checkpointing=False,
    )
    trainer.fit(Line(), loader)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {"records": [{k: v for k, v in one.items() if k != "time"} for one in records]}


def read_aim(folder: Path) -> list[dict[str, Any]]:
    import aim
    from aim.storage.context import Context

    runs = []
    for run in aim.Repo(str(folder / "logs")).iter_runs():
        steps, (values, *_) = run.get_metric("train/loss", Context({})).data.items_list()
        texts = {seq.name: seq for seq in (run.get_text_sequence(n, Context({})) for n in TEXTS)}
        pictures = run.get_image_sequence("batch", Context({})).values.values_list()[0]
        images = [np.asarray(one.to_pil_image()).tolist() for one in pictures]
        runs.append(
            {
                "id": run.hash,
                "name": run.name,
                "project": run.experiment,
                "loss": sorted(zip(steps, values, strict=True)),
                "config": run["hparams"],
                "images": images,
                "table": texts["table"].values.values_list()[0].data,
                "text": texts["sample"].values.values_list()[0].data,
                "status": run["status"],
                "files": sorted(run.artifacts),
                "content": [
                    Path(one.uri.removeprefix("file://")).read_text()
                    for one in run.artifacts.values()
                ],
            }
        )
    return runs


TEXTS = ("table", "sample")


def read_trackio(folder: Path) -> list[dict[str, Any]]:
    import sqlite3

    from PIL import Image

    store = Path(os.environ["TRACKIO_DIR"])
    with sqlite3.connect(store / "project.db") as database:
        rows = list(database.execute("select run_id, run_name, step, metrics from metrics"))
        configs = dict(database.execute("select run_id, config from configs"))
        names = list(database.execute("select name, type from artifacts"))
        manifests = list(database.execute("select manifest from artifact_versions"))
    runs = []
    for identity in dict.fromkeys(row[0] for row in rows):
        mine = [(row[2], json.loads(row[3])) for row in rows if row[0] == identity]
        merged = {key: value for _, one in mine for key, value in one.items()}
        files = [store / "media" / merged[f"batch/{n}"]["file_path"] for n in (0, 1)]
        digests = [one["digest"] for (text,) in manifests for one in json.loads(text)]
        runs.append(
            {
                "id": f"{identity}:{rows[0][1]}",
                "name": rows[0][1],
                "project": "project",
                "loss": [(step, one["train/loss"]) for step, one in mine if "train/loss" in one],
                "config": json.loads(configs[identity]),
                "images": [np.asarray(Image.open(file)).tolist() for file in files],
                "table": merged["table"]["_value"],
                "text": merged["sample"]["_value"],
                "status": merged["status"],
                "files": sorted(f"{name} {kind}" for name, kind in names),
                "content": [next(store.rglob(digest)).read_text() for digest in digests],
            }
        )
    return runs


def read_swanlab(folder: Path) -> list[dict[str, Any]]:
    raise NotImplementedError


def read_dvclive(folder: Path) -> list[dict[str, Any]]:
    raise NotImplementedError


def read_clearml(folder: Path) -> list[dict[str, Any]]:
    raise NotImplementedError


READERS = {
    "aim": read_aim,
    "clearml": read_clearml,
    "dvclive": read_dvclive,
    "swanlab": read_swanlab,
    "trackio": read_trackio,
}

if __name__ == "__main__":
    what, name, where = sys.argv[1:]
    result = {"record": record, "fit": fit}[what](name, Path(where))
    Path(where, f"{what}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # ClearML's exit hooks take minutes
