"""Read back from disk what the SDKs of the services wrote in their offline modes."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

# Without what costs seconds and needs no test of ours.
QUIET_COMET = {
    "online": False,
    "log_code": False,
    "log_env_details": False,
    "log_git_metadata": False,
    "auto_output_logging": False,
    "display_summary_level": 0,
}
QUIET_WANDB = {"mode": "offline", "settings": {"console": "off", "silent": True}}

_BLOCK, _HEAD = 32768, 7
_WHOLE, _LAST = 1, 4


class WandBRun(NamedTuple):
    """One `.wandb` file."""

    run: Any
    rows: list[dict[str, Any]]
    config: dict[str, Any]
    summary: dict[str, Any]
    metrics: list[Any]
    artifacts: list[Any]
    files: Path
    preempting: bool
    exit_code: int | None

    def series(self, name: str) -> list[tuple[int, Any]]:
        """Return the values of a metric, each with its update."""
        return [(row["global_step"], row[name]) for row in self.rows if name in row]


def wandb_runs(folder: Path) -> list[WandBRun]:
    """Return the runs below a folder in the order in which they began."""
    import wandb

    wandb.teardown()  # its process still writes for a moment after a run has finished
    found = sorted(folder.rglob("*.wandb"), key=lambda path: path.stat().st_ctime_ns)
    return [_read_run(path) for path in found]


def _read_run(path: Path) -> WandBRun:
    records = list(_records(path))

    def all_of(kind: str) -> list[Any]:
        return [getattr(one, kind) for one in records if one.WhichOneof("record_type") == kind]

    config: dict[str, Any] = {}
    for update in [one.config for one in all_of("run")] + all_of("config"):
        _put(config, update.update)
    summary: dict[str, Any] = {}
    for update in all_of("summary"):
        _put(summary, update.update)
    rows = []
    for record in all_of("history"):
        row: dict[str, Any] = {}
        _put(row, record.item)
        rows.append(row)
    exits = all_of("exit")
    return WandBRun(
        all_of("run")[-1],
        rows,
        config,
        summary,
        all_of("metric"),
        all_of("artifact"),
        path.parent / "files",
        bool(all_of("preempting")),
        exits[-1].exit_code if exits else None,
    )


def _put(into: dict[str, Any], items: Any) -> None:
    for item in items:
        *outer, last = list(item.nested_key) or [item.key]
        place = into
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = json.loads(item.value_json)


def _records(path: Path) -> Iterator[Any]:
    """Yield the records of the file, a LevelDB log of the SDK's protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, message = _HEAD, b""
    while at + _HEAD <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD:  # a block ends with padding when no record header fits into it
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        message += data[at + _HEAD : at + _HEAD + length]
        at += _HEAD + length
        if kind in (_WHOLE, _LAST):
            yield Record.FromString(message)
            message = b""


class CometRun(NamedTuple):
    """One archive of Comet."""

    experiment: dict[str, Any]
    metrics: dict[str, list[tuple[int | None, float]]]
    parameters: dict[str, Any]
    others: dict[str, Any]
    uploads: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    path: Path

    @property
    def key(self) -> str:
        """The experiment's key at Comet."""
        return str(self.experiment["offline_id"])

    def content(self, upload: dict[str, Any]) -> bytes:
        """Return the bytes of an upload."""
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(upload["file_path"])


def comet_runs(folder: Path) -> list[CometRun]:
    """Return the archives in a folder in the order in which they were written."""
    found = sorted(folder.glob("*.zip"), key=lambda path: path.stat().st_ctime_ns)
    return [_read_archive(path) for path in found]


def _read_archive(path: Path) -> CometRun:
    with zipfile.ZipFile(path) as archive:
        experiment = json.loads(archive.read("experiment.json"))
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]

    def all_of(kind: str) -> list[dict[str, Any]]:
        return [one["payload"] for one in messages if one["type"] == kind]

    metrics: dict[str, list[tuple[int | None, float]]] = {}
    for payload in all_of("metric_msg"):
        one = payload["metric"]
        metrics.setdefault(one["metricName"], []).append((one["step"], one["metricValue"]))
    parameters = {
        payload["param"]["paramName"]: payload["param"]["paramValue"]
        for payload in all_of("parameter_msg")
    }
    others = {payload["key"]: payload["value"] for payload in all_of("log_other")}
    return CometRun(experiment, metrics, parameters, others, all_of("file_upload"), messages, path)


class MLflowRun(NamedTuple):
    """One run in a database of MLflow."""

    id: str
    name: str
    experiment: str
    status: str
    params: dict[str, str]
    tags: dict[str, str]
    metrics: dict[str, list[tuple[int, float]]]
    files: Path


def mlflow_store(folder: Path) -> str:
    """Put an empty database into a folder; return its URI. To create one takes seconds."""
    file = folder / "mlflow.db"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(_empty_database())
    return f"sqlite:///{file}"


@cache
def _empty_database() -> bytes:
    from mlflow import MlflowClient

    # In memory, if there is such a folder: MLflow waits for the disk dozens of times.
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        file = Path(folder, "mlflow.db")
        MlflowClient(f"sqlite:///{file}").search_experiments()
        return file.read_bytes()


def mlflow_runs(folder: Path) -> list[MLflowRun]:
    """Return the runs of the database in a folder in the order in which they began."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    history = client.get_metric_history
    names = {each.experiment_id: each.name for each in client.search_experiments()}
    found = client.search_runs(list(names), order_by=["attributes.start_time"])
    return [
        MLflowRun(
            run.info.run_id,
            run.info.run_name,
            names[run.info.experiment_id],
            run.info.status,
            run.data.params,
            run.data.tags,
            {
                name: sorted((e.step, e.value) for e in history(run.info.run_id, name))
                for name in run.data.metrics
            },
            Path(run.info.artifact_uri.removeprefix("file://")),
        )
        for run in found
    ]
