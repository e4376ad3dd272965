"""Runs of one tracker in a process of its own, for SDKs that leave threads and hooks behind.

``python -m tests.helpers.service_runs <what> <name> <folder>`` writes ``<folder>/<what>.json``.
"""

from __future__ import annotations

import json
import os
import random
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trackers import BackgroundTracker, resolve_trackers
from trainer import Trainer, TrainModule

# A service that is not there, or a disk that refuses, for each tracker.
ABSENT: dict[str, dict[str, Any]] = {
    "aim": {"repo": "aim://127.0.0.1:9"},
    "clearml": {"output_uri": None},  # without CLEARML_OFFLINE_MODE
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


def generators() -> list[Any]:
    """Return the states of the generators that a training draws from."""
    return [
        [*random.getstate()[1]],
        np.random.get_state()[1].tolist(),  # type: ignore[union-attr, arg-type, call-overload]
        torch.get_rng_state().tolist(),
    ]


def outcome(tracker: BackgroundTracker) -> dict[str, Any]:
    """Close the run and say how that went."""
    tracker.drain(60)
    failures = tracker.failures
    tracker.finish()
    return {"id": tracker.run_id, "failures": failures, "dropped": tracker.dropped}


def record(name: str, folder: Path) -> dict[str, Any]:
    """Log everything in a new run."""
    checkpoint = folder / "step-00000002"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    before, hook = generators(), sys.excepthook
    tracker = tracker_of(name, folder)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1, "model": {"dtype": torch.float32, "none": None}})
    for step in (1, 2, 3, 4):
        tracker.log({"train/loss": torch.tensor(float(step))}, step)
    tracker.log({"note": "a text", "parts": {"a": 1}}, 4)
    tracker.log_images({"batch": image(), "one": torch.as_tensor(image()[0])}, 3)
    tracker.log_table("table", columns=["a", "b"], data=[["x", torch.tensor(1)], ["y", 2]], step=3)
    tracker.log_text({"sample": "once upon"}, 3)
    if name not in ("dvclive", "swanlab"):
        tracker.log_histogram({"weights": torch.arange(10.0)}, 3)
    tracker.log_artifact(checkpoint / "model.safetensors", "data", step=2)
    tracker.log_model(checkpoint, step=2)
    done = outcome(tracker)
    (checkpoint / "model.safetensors").unlink()  # a later checkpoint takes its place
    return {**done, "generators": generators() == before, "excepthook": sys.excepthook is hook}


def resume(name: str, folder: Path) -> dict[str, Any]:
    """Resume the run, which had its last checkpoint at update 2; read back what is stored."""
    previous = json.loads((folder / "record.json").read_text())["id"]
    tracker = tracker_of(name, folder)
    tracker.resume(previous, 2)
    tracker.start()
    tracker.store_init_configuration({"new": 0.2})
    for step in (3, 4, 5):
        tracker.log({"train/loss": 10.0 * step}, step)
    return {**outcome(tracker), "runs": READERS[name](folder)}


def join(name: str, folder: Path) -> dict[str, Any]:
    """Log to a run that the script has open; say whether it is the same, and open afterwards."""
    if name == "trackio":
        import trackio

        run = trackio.init("mine", name="own", embed=False, auto_log_cpu=False)
    elif name == "swanlab":
        import swanlab

        run = swanlab.init(project="mine", mode="offline", log_dir=str(folder))
    else:
        from clearml import Task

        run = Task.init("mine", "own", auto_connect_frameworks=False)
    tracker = tracker_of(name, folder)
    tracker.start()
    tracker.log({"train/loss": 1.0}, 1)
    joined = tracker.tracker is run
    tracker.finish()
    still_open = {
        "trackio": lambda: trackio.context_vars.current_run.get() is run,
        "swanlab": lambda: run.alive,
        "clearml": lambda: Task.current_task() is run,
    }
    return {"joined": joined, "failures": tracker.failures, "open": still_open[name]()}


def absent(name: str, folder: Path) -> dict[str, Any]:
    """Train with a service that is not there."""
    return fit(name, folder, **ABSENT.get(name, {}))


def fit(name: str, folder: Path, **options: Any) -> dict[str, Any]:
    """Train with a loader's workers, and without a tracker where the name is "none"."""
    chosen = None if name == "none" else tracker_of(name, folder, **options).wrapped

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
    dataset = torch.utils.data.TensorDataset(data)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=1)
    trainer = Trainer(
        max_epochs=2,
        seed=0,
        log_every=1,
        log_with=chosen,
        project_dir=folder,
        progress_bar=False,
        checkpointing=False,
    )
    trainer.fit(Line(), loader)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    found = {"records": [{k: v for k, v in one.items() if k != "time"} for one in records]}
    return found if options or name == "none" else {**found, "runs": READERS[name](folder)}


def read_aim(folder: Path) -> list[dict[str, Any]]:
    import aim
    from aim.storage.context import Context

    runs = []
    for run in aim.Repo(str(folder / "logs")).iter_runs():
        steps, (values, *_) = run.get_metric("train/loss", Context({})).data.items_list()
        texts = [run.get_text_sequence(name, Context({})) for name in ("table", "sample")]
        images = run.get_image_sequence("batch", Context({}))
        pictures = [] if images is None else images.values.values_list()[0]
        runs.append(
            {
                "id": run.hash,
                "name": run.name,
                "project": run.experiment,
                "loss": sorted(zip(steps, values, strict=True)),
                "config": run["hparams"],
                "images": [np.asarray(one.to_pil_image()).tolist() for one in pictures],
                "texts": [text.values.values_list()[0].data for text in texts if text is not None],
                "status": run["status"],
                "files": {
                    name: Path(one.uri.removeprefix("file://")).read_text()
                    for name, one in run.artifacts.items()
                },
            }
        )
    return runs


def read_trackio(folder: Path) -> list[dict[str, Any]]:
    import sqlite3

    from PIL import Image

    store = Path(os.environ["TRACKIO_DIR"])
    with sqlite3.connect(store / "project.db") as database:
        rows = list(database.execute("select run_id, run_name, step, metrics from metrics"))
        configs = dict(database.execute("select run_id, config from configs"))
        query = (
            "select name, manifest from artifact_versions v join artifacts a on a.id = artifact_id"
        )
        artifacts = list(database.execute(query))
    runs = []
    for identity, name in dict.fromkeys(row[:2] for row in rows):
        mine = [(row[2], json.loads(row[3])) for row in rows if row[0] == identity]
        merged = {key: value for _, one in mine for key, value in one.items()}
        images = [merged[key]["file_path"] for key in ("batch/0", "batch/1") if key in merged]
        runs.append(
            {
                "id": f"{identity}:{name}",
                "name": name,
                "project": "project",
                "loss": [(step, one["train/loss"]) for step, one in mine if "train/loss" in one],
                "config": json.loads(configs[identity]),
                "images": [np.asarray(Image.open(store / "media" / f)).tolist() for f in images],
                "texts": [merged[key]["_value"] for key in ("table", "sample") if key in merged],
                "status": merged["status"],
                "files": {
                    f"{label}/{one['path']}": next(store.rglob(one["digest"])).read_text()
                    for label, manifest in artifacts
                    for one in json.loads(manifest)
                },
            }
        )
    return runs


def read_swanlab(folder: Path) -> list[dict[str, Any]]:
    import yaml
    from PIL import Image
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.proto.swanlab.run.v1.run_pb2 import RunState
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    runs: list[dict[str, Any]] = []
    for path in sorted((folder / "logs").rglob("*.swanlab"), key=lambda each: each.parent.name):
        reader = DataStoreReader()
        reader.open(path)
        records = [Record.FromString(data) for data in reader]
        reader.close()
        (start,) = (one.start for one in records if one.HasField("start"))
        scalars = [one.scalar for one in records if one.HasField("scalar")]
        media = {one.media.key: one.media.value.items for one in records if one.HasField("media")}
        saved = [one.save for one in records if one.HasField("save") and one.save.target_path]
        (end,) = (one.finish for one in records if one.HasField("finish"))
        config = yaml.safe_load((path.parent / "files/config.yaml").read_text())

        def content(kind: str, key: str, path: Path = path, media: Any = media) -> list[Path]:
            return [path.parent / "media" / kind / one.filename for one in media.get(key, [])]

        runs.append(
            {
                "id": start.id,
                "name": start.name,
                "project": start.project,
                "loss": [(e.step, e.value.number) for e in scalars if e.key == "train/loss"],
                "config": {key: one["value"] for key, one in config.items()},
                "images": [np.asarray(Image.open(f)).tolist() for f in content("image", "batch")],
                "texts": [
                    *(json.loads(f.read_text())["rowData"] for f in content("echarts", "table")),
                    *(file.read_text() for file in content("text", "sample")),
                ],
                "status": RunState.Name(end.state),
                "files": {one.name: Path(one.target_path).read_text() for one in saved},
            }
        )
    return runs


def files_of(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def contents(file: Path) -> dict[str, str]:
    """Return the texts in a file, or in an archive of files."""
    if file.suffix != ".zip":
        return {file.name: file.read_text()}
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def read_dvclive(folder: Path) -> list[dict[str, Any]]:
    import yaml
    from PIL import Image

    live = folder / "logs" / "dvclive"
    rows = [row.split() for row in (live / "plots/metrics/train/loss.tsv").read_text().splitlines()]
    summary = json.loads((live / "metrics.json").read_text())
    images = [live / f"plots/images/batch/{number}/3.png" for number in (0, 1)]
    definition = yaml.safe_load((live / "dvc.yaml").read_text())
    tables = [json.loads(file.read_text()) for file in live.glob("plots/custom/*.json")]
    return [
        {
            "id": str(live),
            "name": "first",
            "project": "project",
            "loss": [(int(step), float(value)) for step, value in rows[1:]],
            "config": yaml.safe_load((live / "params.yaml").read_text()),
            "images": [np.asarray(Image.open(f)).tolist() for f in images if f.exists()],
            "texts": [*tables, *([summary["sample"]] if "sample" in summary else [])],
            "status": summary["status"],
            "files": {
                f"{name}/{file.name}": file.read_text()
                for name, one in definition.get("artifacts", {}).items()
                for file in files_of(live / one["path"])
            },
        }
    ]


def read_clearml(folder: Path) -> list[dict[str, Any]]:
    from PIL import Image

    runs: list[dict[str, Any]] = []
    store = Path(os.environ["CLEARML_CACHE_DIR"], "offline")
    for path in sorted(store.glob("*/task.json"), key=lambda each: each.stat().st_ctime_ns):
        task = json.loads(path.read_text())
        lines = (path.parent / "metrics.jsonl").read_text().splitlines()
        events = [event for line in lines for event in json.loads(line)]
        losses = [e for e in events if (e["metric"], e["variant"]) == ("loss", "train")]
        images = sorted(path.parent.rglob("batch*.jpeg"))
        artifacts = sorted((path.parent / "data").rglob("artifacts/*/*"))
        runs.append(
            {
                "id": task["id"],
                "name": task["name"],
                "project": task["project_name"],
                "loss": [(event["iter"], event["value"]) for event in losses],
                "config": {
                    f"{section}/{one['name']}": one.get("value")
                    for section, each in task["hyperparams"].items()
                    for one in each.values()
                },
                "images": [np.asarray(Image.open(file)).tolist() for file in images],
                "texts": [
                    *(
                        json.loads(event["plot_str"])["data"][0]["cells"]["values"]
                        for event in events
                        if event["metric"] == "table"
                    ),
                    *(file.read_text() for file in path.parent.rglob("sample*.txt")),
                ],
                "status": None,  # an offline session has none
                "files": {
                    f"{file.parent.name}/{name}": text
                    for file in artifacts
                    for name, text in contents(file).items()
                },
                "tags": task.get("tags"),
            }
        )
    return runs


READERS = {
    "aim": read_aim,
    "clearml": read_clearml,
    "dvclive": read_dvclive,
    "swanlab": read_swanlab,
    "trackio": read_trackio,
}

if __name__ == "__main__":
    what, name, where = sys.argv[1:]
    result = {"record": record, "resume": resume, "fit": fit, "absent": absent, "join": join}[what](
        name, Path(where)
    )
    Path(where, f"{what}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # ClearML's exit hooks take minutes
