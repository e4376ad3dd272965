"""Checkpoints in a bucket: outages, kills and new machines against a real S3 API on loopback."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, ModelCheckpoint
from trackers import read_metrics
from trainer import Trainer, TrainModule
from trainer.checkpoint import mirror
from trainer.checkpoint.storage import committed, read_manifest, verify
from trainer.configuration import FullyShardedDataParallelPlugin
from trainer.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
SECRET = "the-secret-of-the-bucket"
LIMIT = 200  # seconds for a process that imports torch on a busy machine


def same_tensors(file: Path, other: Path) -> bool:
    ours, expected = load_file(file), load_file(other)
    return ours.keys() == expected.keys() and all(
        torch.equal(ours[name], expected[name]) for name in expected
    )


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Tell(Callback):
    """Prints each update, and waits for a line where the program was told to."""

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        print(f"update {trainer.global_step}", flush=True)
        if str(trainer.global_step) in os.environ.get("PAUSE_AT", "").split(","):
            sys.stdin.readline()


def train(folder: Path, url: str | None, epochs: int, path: Any = "auto", **options: Any) -> Net:
    """Train for 8 updates an epoch; save every 4 updates, keep the two best and the last."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 4))
    trainer = Trainer(
        max_epochs=epochs,
        seed=1,
        project_dir=folder,
        log_every=1,
        progress_bar=False,
        callbacks=[
            Tell(),
            ModelCheckpoint(
                monitor="loss", every="4 steps", mirror=url, **{"save_top_k": 2, **options}
            ),
        ],
    )
    net = Net()
    trainer.fit(net, DataLoader(data, batch_size=4, shuffle=True), ckpt_path=path)
    return net


def train_sharded(folder: Path, url: str | None, epochs: int) -> Net:
    """The same with FSDP, on the processes that there are."""
    torch.manual_seed(0)
    trainer = Trainer(
        max_epochs=epochs,
        seed=1,
        project_dir=folder,
        progress_bar=False,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        callbacks=[ModelCheckpoint(every="4 steps", mirror=url)],
    )
    net = Net()
    data = TensorDataset(torch.randn(64, 4))
    trainer.fit(net, DataLoader(data, batch_size=4, shuffle=True), ckpt_path="auto")
    return net


# -- a service -------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """Forwards requests to the service, or answers by the rule of its server."""

    protocol_version = "HTTP/1.1"
    server: Gate

    def forward(self) -> None:
        if self.headers.get("Expect") == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = self.server.rule(self.command, self.path)
        if answer == "cut":
            self.close_connection = True
        elif answer is not None:
            text = b"<Error><Code>Fault</Code><Message>of the test</Message></Error>"
            self.reply(int(answer), {"Content-Type": "application/xml"}, text)
        else:
            service = HTTPConnection(*self.server.service, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name != "Expect"}
            service.request(self.command, self.path, body, headers)
            response = service.getresponse()
            self.reply(response.status, dict(response.getheaders()), response.read())
            service.close()

    def reply(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        of_connection = ("connection", "transfer-encoding", "date", "server")
        for name, value in headers.items():
            if name.lower() not in (*of_connection, "content-length"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward


class Gate(ThreadingHTTPServer):
    """An HTTP proxy before the service, which fails requests as it is told to.

    Attributes:
        rule: Called with the method and the path of each request; returns a status to answer with,
            None to forward it, or "cut" to close the connection. It may wait.
    """

    daemon_threads = True

    def __init__(self, service: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.service = service
        self.rule: Callable[[str, str], int | str | None] = lambda method, path: None
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a program that was killed

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class Bucket:
    """A bucket of its own, and what a program needs to reach it."""

    def __init__(self, gate: Gate, name: str) -> None:
        self.gate, self.url = gate, f"s3://{name}/run"
        self.variables = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": gate.url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        }
        self._name = name

    def files(self) -> dict[str, bytes]:
        """The files in the bucket, by their path in the run."""
        listed = ElementTree.fromstring(self._answer("GET", f"/{self._name}?list-type=2"))
        keys = [each.text or "" for each in listed.iterfind("{*}Contents/{*}Key")]
        assert listed.findtext("{*}IsTruncated") == "false"
        return {
            key.removeprefix("run/"): self._answer("GET", f"/{self._name}/{quote(key)}")
            for key in keys
        }

    def make(self) -> None:
        self._answer("PUT", f"/{self._name}")

    def copy(self) -> Bucket:
        """Another bucket with the same files."""
        other = Bucket(self.gate, f"{self._name}-copy")
        other.make()
        for path, content in self.files().items():
            self._answer("PUT", f"/{other._name}/run/{quote(path)}", content)
        return other

    def _answer(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Ask the service, which checks that requests are signed, but not how."""
        connection = HTTPConnection(*self.gate.service, timeout=60)
        signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/0/us-east-1/s3/aws4_request"}
        connection.request(method, path, body, signed)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        assert response.status == 200, content
        return content


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[str, int]]:
    started = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in started.stderr:
        if "Running on http://127.0.0.1:" in line:
            port = int(line.rpartition(":")[2].split()[0].rstrip("/"))
            break
    drain = threading.Thread(target=started.stderr.read, daemon=True)
    drain.start()
    yield "127.0.0.1", port
    started.kill()
    started.wait()
    drain.join()
    started.stderr.close()


@pytest.fixture
def bucket(service: tuple[str, int], request: pytest.FixtureRequest) -> Iterator[Bucket]:
    pytest.importorskip("s3fs")
    gate = Gate(service)
    name = "b" + hashlib.sha256(request.node.name.encode()).hexdigest()[:20]
    made = Bucket(gate, name)
    made.make()
    yield made
    gate.close()


@pytest.fixture
def program(tmp_path: Path, bucket: Bucket) -> Iterator[Callable[..., Any]]:
    """Starts `train` in a process of its own, with the bucket as its mirror."""
    running: list[subprocess.Popen[str]] = []

    def start(
        folder: str,
        epochs: int,
        pause_at: object = 0,
        mirrored: Bucket = bucket,
        **options: object,
    ) -> subprocess.Popen[str]:
        script = (
            f"from tests.faults.test_mirror import train; from pathlib import Path\n"
            f"train(Path({folder!r}), {mirrored.url!r}, {epochs}, **{options})"
        )
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={
                    **os.environ,
                    **bucket.variables,
                    "PYTHONPATH": str(ROOT),
                    "PAUSE_AT": str(pause_at),
                },
            )
        )
        return running[-1]

    yield start
    for each in running:
        if each.poll() is None:
            each.kill()
        each.communicate()


def until(running: subprocess.Popen[str], text: str) -> str:
    """Read the output of a program until a line with a text; return what came before."""
    lines: list[str] = []
    for line in running.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"{text!r} was not printed:\n{''.join(lines)}")


def go_on(running: subprocess.Popen[str]) -> None:
    """Let a program that pauses make its next updates."""
    running.stdin.write("\n")
    running.stdin.flush()


def finish(running: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = running.communicate("\n", timeout=LIMIT)
    assert running.returncode == code, output
    return output


def check_same_files(folder: Path, bucket: Bucket) -> None:
    """The bucket holds the checkpoints of a folder, to the last byte, and no others."""
    local = {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for path in committed(folder)
        for file in path.rglob("*")
        if file.is_file()
    }
    assert bucket.files() == local
    assert local


# -- new machines ----------------------------------------------------------------------------------


def test_a_run_continues_on_a_new_machine(bucket, program, tmp_path):
    """Weights, kept checkpoints and bucket are those of a run on one machine."""
    finish(program("first", 2))
    check_same_files(tmp_path / "first" / "checkpoints", bucket)
    output = finish(program("second", 4))
    assert "update 17\n" in output
    assert "update 16\n" not in output
    train(tmp_path / "plain", None, 4)
    plain, second = (committed(tmp_path / name / "checkpoints") for name in ("plain", "second"))
    assert [path.name for path in plain] == [path.name for path in second]
    for ours, expected in zip(second, plain, strict=True):
        assert same_tensors(ours / "model.safetensors", expected / "model.safetensors")
    check_same_files(tmp_path / "second" / "checkpoints", bucket)
    written = b"".join(f.read_bytes() for f in tmp_path.rglob("*") if f.is_file())
    assert SECRET.encode() not in written


# -- outages ---------------------------------------------------------------------------------------


def test_outages_do_not_stop_the_run_and_are_caught_up(bucket, program, tmp_path):
    """Each begins at the upload of the next checkpoint, and ends after an update behind it."""
    begun, faults = threading.Event(), ("cut", 403, 500, 503, 507)
    fault: int | str | None = faults[0]

    def rule(method: str, path: str) -> int | str | None:
        if method in ("PUT", "POST"):
            begun.set()
        return fault if begun.is_set() else None

    bucket.gate.rule = rule
    updates = [5, 9, 13, 17, 21]
    running, output = program("run", 3, pause_at=",".join(map(str, updates))), ""
    for update, fault in zip(updates, faults, strict=True):
        if update > 5:
            go_on(running)
        heard = until(running, "cannot be written to")
        if f"update {update}\n" not in heard:
            heard += until(running, f"update {update}\n")
        fault = None
        output += heard + until(running, "can be written to again")
    output += finish(running)
    assert output.count("cannot be written to") == output.count("can be written to again") == 5
    check_same_files(tmp_path / "run" / "checkpoints", bucket)


def test_a_slow_upload_is_completed_though_its_checkpoint_was_displaced(bucket, program, tmp_path):
    begun, over, requests = threading.Event(), threading.Event(), []

    def rule(method: str, path: str) -> None:
        requests.append((method, path.partition("?")[0]))
        if method == "PUT" and "step-00000004" in path:
            begun.set()
            over.wait(LIMIT)

    bucket.gate.rule = rule
    running = program("run", 3, pause_at="5,20", save_top_k=0)
    assert begun.wait(LIMIT)
    go_on(running)
    until(running, "update 20\n")
    kept = [path.name for path in committed(tmp_path / "run" / "checkpoints")]
    assert "step-00000004" not in kept
    over.set()
    finish(running)
    uploaded = [path for method, path in requests if method == "PUT" and "manifest" in path]
    assert "step-00000004" in uploaded[0]
    assert len(uploaded) >= 2
    assert [path.name for path in committed(tmp_path / "run" / "checkpoints")] == ["step-00000024"]
    check_same_files(tmp_path / "run" / "checkpoints", bucket)


def test_a_kill_inside_an_upload_leaves_nothing_half_visible(bucket, program, tmp_path):
    first, inside, over = threading.Event(), threading.Event(), threading.Event()

    def rule(method: str, path: str) -> None:
        if method == "PUT" and "step-00000004/manifest.json" in path:
            first.set()
        if method == "PUT" and "step-00000008/optimizer" in path and not over.is_set():
            inside.set()
            over.wait(LIMIT)

    bucket.gate.rule = rule
    running = program("first", 3, pause_at="5,9")
    until(running, "update 5\n")
    assert first.wait(LIMIT)
    go_on(running)
    assert inside.wait(LIMIT)
    running.send_signal(signal.SIGKILL)
    finish(running, -signal.SIGKILL)
    over.set()
    names = bucket.files().keys()
    assert "step-00000004/manifest.json" in names
    assert "step-00000008/manifest.json" not in names
    train(tmp_path / "plain", None, 3)
    last = "checkpoints/step-00000024/model.safetensors"
    # The same machine has a whole checkpoint that the bucket lacks; a new one has the bucket alone.
    for folder, step, holds in (("second", 4, bucket.copy()), ("first", 8, bucket)):
        output = finish(program(folder, 3, mirrored=holds))
        assert f"update {step + 1}\n" in output
        assert f"update {step}\n" not in output
        check_same_files(tmp_path / folder / "checkpoints", holds)
        assert same_tensors(tmp_path / folder / last, tmp_path / "plain" / last)


def test_a_new_machine_does_not_begin_anew_while_the_mirror_cannot_be_read(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/bucket"
    train(tmp_path / "first", url, 1)

    def fail(self: mirror.Remote) -> list[str]:
        raise OSError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(mirror.Remote, "names", fail)
        with pytest.raises(
            CheckpointError, match="unknown whether this run has earlier checkpoints"
        ):
            train(tmp_path / "second", url, 2)
    train(tmp_path / "second", url, 2)
    assert read_metrics(tmp_path / "second" / "metrics.jsonl")[0]["step"] == 9


def test_a_fit_ends_with_a_warning_if_the_service_does_not_come_back(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(mirror, "_PATIENCE", 0.0)
    (tmp_path / "bucket").write_text("a file where the folder would be")
    url = f"file://{tmp_path}/bucket"
    train(tmp_path / "run", url, 1)
    assert "Uploading to" in caplog.text
    (tmp_path / "bucket").unlink()
    train(tmp_path / "run", url, 1)  # nothing is left to do but this
    assert [path.name for path in committed(tmp_path / "bucket")] == [
        path.name for path in committed(tmp_path / "run" / "checkpoints")
    ]


# -- which checkpoints -----------------------------------------------------------------------------


def test_a_damaged_copy_is_not_used(tmp_path, caplog):
    url = f"file://{tmp_path}/bucket"
    train(tmp_path / "first", url, 3)
    *_, older, newest = committed(tmp_path / "bucket")
    file = newest / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    train(tmp_path / "second", url, 4)
    assert f"{newest.name} is not used: model.safetensors is damaged" in caplog.text
    first = read_metrics(tmp_path / "second" / "metrics.jsonl")[0]["step"]
    assert first == int(older.name.removeprefix("step-")) + 1
    for path in committed(tmp_path / "bucket"):
        verify(path)


def test_a_branch_that_was_given_up_is_not_resumed_elsewhere(tmp_path):
    url = f"file://{tmp_path}/bucket"
    train(tmp_path / "first", url, 2, save_top_k=-1)
    back = tmp_path / "first" / "checkpoints" / "step-00000004"
    train(tmp_path / "first", url, 1, path=back, save_top_k=-1)
    mirrored = [path.name for path in committed(tmp_path / "bucket")]
    assert mirrored == ["step-00000004", "step-00000008"]
    train(tmp_path / "second", url, 2, save_top_k=-1)
    assert read_metrics(tmp_path / "second" / "metrics.jsonl")[0]["step"] == 9


def test_a_mirror_belongs_to_one_run(tmp_path, caplog):
    url = f"file://{tmp_path}/bucket"
    train(tmp_path / "first", url, 1)
    before = read_manifest(committed(tmp_path / "bucket")[-1])
    with pytest.raises(ValueError, match="another run"):
        train(tmp_path / "second", url, 1, path=None)
    train(tmp_path / "second", None, 1, path=None)
    with pytest.raises(CheckpointError, match="a separate mirror"):
        train(tmp_path / "second", url, 2)
    assert read_manifest(committed(tmp_path / "bucket")[-1]) == before


@pytest.mark.parametrize(
    ("mirror_url", "message"),
    [("bucket/run", "is a URL"), ("s3://key:word@bucket/run", "contains a password")],
)
def test_wrong_urls_are_refused(mirror_url, message):
    with pytest.raises(ValueError, match=message):
        ModelCheckpoint(mirror=mirror_url)


def test_each_rank_fetches_its_share_of_a_sharded_checkpoint(ranks, tmp_path):
    """On a new machine, two ranks with FSDP resume bit for bit; a file is read by one of them."""
    url = f"file://{tmp_path}/bucket"

    def run(folder: str, epochs: int, url: str | None) -> tuple[list[str], dict[str, Any]]:
        fetched: list[str] = []
        download = mirror.Remote.download

        def note(self: mirror.Remote, name: str, file_name: str, to: Path) -> None:
            fetched.append(f"{name}/{file_name}")
            download(self, name, file_name, to)

        mirror.Remote.download = note
        try:
            net = train_sharded(tmp_path / folder, url, epochs)
        finally:
            mirror.Remote.download = download
        return fetched, {n: p.full_tensor().detach() for n, p in net.named_parameters()}

    pool = ranks(2)
    pool(run, "first", 1, url)
    (of_first, weights), (of_second, _) = pool(run, "second", 2, url)
    (_, expected), _ = pool(run, "plain", 2, None)
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
    shards = [
        n for n in (*of_first, *of_second) if "/shard-" in n and n.startswith("step-00000008")
    ]
    assert len(shards) == len(set(shards)) == 2
    assert not set(of_first) & set(of_second)
