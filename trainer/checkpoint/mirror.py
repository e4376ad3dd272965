"""Mirrors: copies of the committed checkpoints of a folder, at an fsspec URL such as a bucket's.

A checkpoint exists there once its manifest does, which is uploaded last and removed first::

    s3://bucket/run/step-00000100/model.safetensors   uploaded before the manifest
    s3://bucket/run/step-00000100/manifest.json       from here on it is complete
    s3://bucket/run/step-00000200/abandoned.json      the manifest of a branch that was given up

Rank 0 uploads on a background thread. It uploads hard links to the files, so that a checkpoint
which is removed or replaced in the meantime is still uploaded whole. Nothing is removed there
before a newer checkpoint is complete there. While the service fails, uploads are tried again.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.checkpoint.save import Ranks, is_writer_rank, run_on_all_ranks
from trainer.checkpoint.storage import (
    MANIFEST,
    commit,
    committed,
    describe_files,
    discard,
    fields_of,
    link_files,
    open_staging,
    read_manifest,
    run_id_of,
    share_of_files,
    step_of,
)
from trainer.errors import CheckpointError, module_logger

logger = module_logger(__name__)

_ABANDONED = "abandoned.json"
_LONGEST_PAUSE = 60.0  # seconds between attempts while the service fails
_PATIENCE = 30.0  # seconds in which a failing service may recover when a fit ends
_AT_ONCE = 10  # the number of checkpoints that a new machine fetches at most


class Remote:
    """The checkpoints at an fsspec URL.

    Args:
        url: The folder of the checkpoints.

    Raises:
        ValueError: The URL cannot be used; the message says why.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        try:
            # Listings that are cached would not show what other machines write.
            self._files, path = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            raise ValueError(f"mirror={url!r} cannot be used: {error}") from error
        if hasattr(self._files, "auto_mkdir"):  # only file systems with real folders have it
            self._files.auto_mkdir = True
        self.url, self._root = url, path.rstrip("/")

    def names(self) -> list[str]:
        """Return the names of checkpoints, complete or not, newest first."""
        try:
            entries = self._files.ls(self._root, detail=False)
        except FileNotFoundError:  # nothing was uploaded yet
            return []
        names = {str(entry).rstrip("/").rpartition("/")[2] for entry in entries}
        return sorted(
            (name for name in names if step_of(name) is not None),
            key=lambda name: step_of(name) or 0,
            reverse=True,
        )

    def manifest(self, name: str) -> dict[str, Any] | None:
        """Return the manifest of a checkpoint; None if it is not complete or is damaged."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                self.download(name, MANIFEST, Path(folder))
                return read_manifest(Path(folder))
            except FileNotFoundError:
                return None
            except CheckpointError as error:
                logger.warning("%s/%s is not used: %s", self.url, name, error)
                return None

    def complete(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return the names and manifests of the complete checkpoints, newest first."""
        for name in self.names():
            if (manifest := self.manifest(name)) is not None:
                yield name, manifest

    def upload(self, file: Path, name: str, file_name: str) -> None:
        """Upload a file of a checkpoint."""
        self._files.put_file(str(file), self._path(name, file_name))

    def download(self, name: str, file_name: str, folder: Path) -> None:
        """Download a file of a checkpoint into a local folder."""
        local = folder / file_name
        local.parent.mkdir(parents=True, exist_ok=True)
        self._files.get_file(self._path(name, file_name), str(local))

    def abandon(self, name: str) -> None:
        """Rename the manifest of a checkpoint, so that no run resumes from it."""
        self._files.mv(self._path(name, MANIFEST), self._path(name, _ABANDONED))

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first."""
        with suppress(FileNotFoundError):
            self._files.rm_file(self._path(name, MANIFEST))
        with suppress(FileNotFoundError):
            self._files.rm(f"{self._root}/{name}", recursive=True)

    def _path(self, name: str, file_name: str) -> str:
        return f"{self._root}/{name}/{file_name}"


class Mirror:
    """Uploads the checkpoints of a folder on a background thread, on one process.

    Args:
        root: The folder. Those of `run_id` that are in it, and not complete there, are uploaded.
        remote: Where to.
        run_id: The run; checkpoints of others are neither uploaded nor removed nor replaced.
        step: The update at which the run starts. Later checkpoints of the run that are there belong
            to a branch that is given up; their manifests are renamed.
    """

    def __init__(self, root: Path, remote: Remote, run_id: str, step: int) -> None:
        self._root, self._remote, self._run_id = root, remote, run_id
        self._changed = threading.Condition()
        self._waiting = {path.name for path in committed(root) if run_id_of(path) == run_id}
        self._obsolete: set[str] = set()
        self._step: int | None = step
        self._sent: set[tuple[str, str, str]] = set()  # name, file and hash
        self._deadline: float | None = None
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="cadence-mirror", daemon=True)
        self._thread.start()

    def committed(self, path: Path, displaced: Iterable[Path] = ()) -> None:
        """Upload a checkpoint that was committed, and then remove those that it displaces."""
        with self._changed:
            self._obsolete.discard(path.name)
            self._waiting.add(path.name)
            self._changed.notify()
        self.remove(displaced)

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove checkpoints once all that wait are uploaded."""
        names = {path.name for path in paths if path.parent == self._root}
        with self._changed:
            self._waiting -= names
            self._obsolete |= names
            self._changed.notify()

    def close(self) -> None:
        """Wait until everything is uploaded, or the service fails for 30 seconds."""
        with self._changed:
            self._deadline = time.monotonic() + _PATIENCE
            self._changed.notify()
        self._thread.join(5.0)
        if self._thread.is_alive():
            logger.warning("Waiting for the upload of checkpoints to %s.", self._remote.url)
            self._thread.join()
        if left := sorted(self._waiting):
            logger.warning(
                "Not uploaded to %s: %s. The next fit with this project_dir uploads what is still "
                "kept.",
                self._remote.url,
                ", ".join(left),
            )
        if self._obsolete:
            names = ", ".join(sorted(self._obsolete))
            logger.warning("No longer kept, but not removed from %s: %s.", self._remote.url, names)

    def abandon(self) -> None:
        """Forget what is not uploaded, because the process is about to end."""
        with self._changed:
            self._deadline = time.monotonic()
            self._waiting.clear()
            self._obsolete.clear()
            self._changed.notify()

    def _run(self) -> None:
        pause = 0.0
        while self._wait(pause):
            try:
                self._next()
            except _OtherRunError as error:
                logger.error("%s Nothing more is uploaded there.", error)
                return
            except Exception as error:  # noqa: BLE001 - file systems raise errors of their own
                if not self._failed:
                    logger.warning(
                        "%s cannot be written to: %r. Checkpoints are kept in %s, and uploaded "
                        "when it can.",
                        self._remote.url,
                        error,
                        self._root,
                    )
                self._failed, pause = True, min(2 * pause or 1.0, _LONGEST_PAUSE)
            else:
                if self._failed:
                    logger.warning("%s can be written to again.", self._remote.url)
                self._failed, pause = False, 0.0

    def _wait(self, pause: float) -> bool:
        """Wait for work, after a failure for `pause` seconds too; return False to end."""
        with self._changed:
            if pause:
                left = pause if self._deadline is None else min(pause, 1.0)
                self._changed.wait_for(lambda: self._deadline is not None, left)
                if self._deadline is not None and time.monotonic() > self._deadline:
                    return False
            self._changed.wait_for(lambda: self._has_work() or self._deadline is not None)
            return self._has_work()

    def _has_work(self) -> bool:
        return self._step is not None or bool(self._waiting or self._obsolete)

    def _next(self) -> None:
        """Do one piece of work: leave a branch, upload the newest checkpoint, or remove one."""
        if self._step is not None:
            self._leave_branch(self._step)
            self._step = None
            return
        with self._changed:
            newest = max(self._waiting, key=lambda name: step_of(name) or 0, default=None)
            obsolete = next(iter(self._obsolete), None)
        if newest is not None:
            self._upload(newest)
        elif obsolete is not None:
            manifest = self._remote.manifest(obsolete)
            if manifest is None or manifest.get("run_id") == self._run_id:
                self._remote.remove(obsolete)
            with self._changed:
                self._obsolete.discard(obsolete)

    def _leave_branch(self, step: int) -> None:
        for name, manifest in self._remote.complete():
            self._check_ours(name, manifest)
            if (step_of(name) or 0) <= step:
                return
            self._remote.abandon(name)

    def _upload(self, name: str) -> None:
        with self._changed:
            self._waiting.discard(name)
        if (links := link_files(self._root / name)) is None:
            return  # a save that replaced it calls `committed` again
        try:
            manifest = read_manifest(links)
            there = self._remote.manifest(name)
            if there == manifest:
                return
            if there is not None:
                self._check_ours(name, there)
                self._remote.abandon(name)
            for file, described in manifest["files"].items():
                sent = (name, file, described["sha256"])
                if sent not in self._sent:  # else by an attempt that failed later
                    self._remote.upload(links / file, name, file)
                    self._sent.add(sent)
            self._remote.upload(links / MANIFEST, name, MANIFEST)
        except Exception:
            with self._changed:
                self._waiting |= {name} - self._obsolete
            raise
        finally:
            discard(links)
        self._sent = {sent for sent in self._sent if sent[0] != name}

    def _check_ours(self, name: str, manifest: Mapping[str, Any]) -> None:
        if manifest.get("run_id") != self._run_id:
            raise _OtherRunError(f"{self._remote.url}/{name} is a checkpoint of another run.")


class _OtherRunError(Exception):
    """The URL holds checkpoints of another run."""


def holds_any(url: str) -> bool:
    """Return whether a complete checkpoint lies at a URL; False, with a warning, if unknown."""
    remote = Remote(url)
    try:
        return next(remote.complete(), None) is not None
    except Exception as error:  # noqa: BLE001 - file systems raise errors of their own
        logger.warning("%s cannot be read: %r.", url, error)
        return False


def fetch(roots: Mapping[Path, str], state: Ranks, *, on_each_node: bool) -> None:
    """Fetch the checkpoints at mirrors that are newer than those here; collective.

    Where there are none here, the ten newest are fetched. Ranks that share a disk fetch each file
    once.

    Args:
        roots: The URL of each folder that has a mirror.
        state: The ranks.
        on_each_node: The machines share no disk: each fetches what it lacks.

    Raises:
        CheckpointError: A mirror cannot be read, and there are no checkpoints here; or it has
            those of another run. Raised on all ranks.
    """
    writes = is_writer_rank(state, on_each_node)
    for root, url in roots.items():
        listed, lacking = _plan(root, url, state, writes)
        for name in sorted(set().union(*lacking), key=lambda name: step_of(name) or 0):
            fetches = name in lacking[state.process_index]
            _fetch(root / name, url, listed[name], state, fetches=fetches, alone=on_each_node)


def _plan(
    root: Path, url: str, state: Ranks, writes: bool
) -> tuple[dict[str, dict[str, Any]], list[list[str]]]:
    """Return the manifests at a mirror, and the names that each rank has to fetch; collective."""
    what = f"Looking for checkpoints at {url}"
    listed = run_on_all_ranks(
        what, lambda: _list(root, url) if state.is_main_process else {}, state
    )[0]

    def lacking() -> list[str]:
        newest = max((step_of(path) or 0 for path in committed(root)), default=-1)
        return [name for name in listed if (step_of(name) or 0) > newest]

    return listed, run_on_all_ranks(what, lambda: lacking() if writes else [], state)


def _fetch(
    target: Path,
    url: str,
    manifest: Mapping[str, Any],
    state: Ranks,
    *,
    fetches: bool,
    alone: bool,
) -> None:
    """Download a checkpoint, and commit it if its hashes are those of its manifest; collective.

    Args:
        target: Where to.
        url: The mirror.
        manifest: The manifest there.
        state: The ranks.
        fetches: Whether this is a writer rank that lacks it.
        alone: A writer rank downloads all files; otherwise the ranks share them.
    """
    what, files = f"Fetching {url}/{target.name}", manifest["files"]
    folders = run_on_all_ranks(what, lambda: open_staging(target) if fetches else None, state)
    staging = folders[state.process_index if alone else 0]
    share = (0, 1) if alone else (state.process_index, state.num_processes)

    def download() -> list[str]:
        if staging is None:
            return []
        names, remote = share_of_files(files, *share), Remote(url)
        for name in names:
            remote.download(target.name, name, staging)
        described = describe_files(staging, names)
        return [name for name in names if described[name] != files[name]]

    damaged = [name for names in run_on_all_ranks(what, download, state) for name in names]

    def end() -> None:
        if not fetches or staging is None:
            return
        if damaged:
            discard(staging)
            logger.warning("%s/%s is not used: %s is damaged.", url, target.name, damaged[0])
        else:
            commit(staging, target, fields_of(manifest), files)

    run_on_all_ranks(what, end, state)


def _list(root: Path, url: str) -> dict[str, dict[str, Any]]:
    """Return the manifests of the newest complete checkpoints at a mirror, by name."""
    here = committed(root)
    remote = Remote(url)
    try:
        listed = dict(islice(remote.complete(), 1 if here else _AT_ONCE))
    except Exception as error:  # file systems raise errors of their own
        if here:
            logger.warning(
                "%s cannot be read: %r. The checkpoints in %s are used.", url, error, root
            )
            return {}
        raise CheckpointError(
            f"{url} cannot be read: {error!r}. There are no checkpoints in {root}, so whether the "
            "run has begun is unknown"
        ) from error
    runs = {manifest.get("run_id") for manifest in listed.values()}
    runs |= {run_id_of(path) for path in here[-1:]}
    if len(runs - {None}) > 1:
        raise CheckpointError(
            f"{url} has checkpoints of several runs, or of another than {root}. Give each run a "
            "mirror of its own"
        )
    return listed
