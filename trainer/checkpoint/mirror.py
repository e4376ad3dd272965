"""Mirrors: copies of the committed checkpoints of a folder, at an fsspec URL such as a bucket's.

A remote checkpoint exists once its manifest does, which is uploaded last and removed first::

    s3://bucket/run/step-00000100/model.safetensors   uploaded before the manifest
    s3://bucket/run/step-00000100/manifest.json       from here on it is complete
    s3://bucket/run/step-00000200/abandoned.json      the manifest of a branch that was given up

Rank 0 uploads on a background thread. It uploads hard links to the files, so that a checkpoint
which is removed or replaced in the meantime is still uploaded whole. A remote checkpoint is removed
once the upload of the one that displaced it is complete. While the service fails, uploads are
retried.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.checkpoint.save import Ranks, is_writer_rank, no_shared_disk, run_on_all_ranks
from trainer.checkpoint.storage import (
    MANIFEST,
    commit,
    committed,
    describe_files,
    discard,
    fields_of,
    link_files,
    open_staging,
    quarantine,
    read_manifest,
    run_id_of,
    share_of_files,
    step_of,
    verify,
)
from trainer.distributed.objects import all_gather_object
from trainer.errors import CheckpointError, module_logger

logger = module_logger(__name__)

_ABANDONED = "abandoned.json"
_LONGEST_PAUSE = 60.0  # seconds between attempts while the service fails
_PATIENCE = 30.0  # seconds that a failing service has to recover when a fit ends
LOOKS = 5.0  # seconds between checks whether the uploads have ended
_AT_ONCE = 10  # maximum number of checkpoints that a new machine fetches


def _step(name: str) -> int:
    return step_of(name) or 0


class Remote:
    """The checkpoints at an fsspec URL.

    Args:
        url: The folder of the checkpoints.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    @cached_property
    def _connected(self) -> tuple[Any, str]:
        """The file system and the folder's path in it; some connect here, and may fail."""
        from fsspec.core import url_to_fs

        # Cached listings would not show files that other machines write.
        files, path = url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        if hasattr(files, "auto_mkdir"):  # only file systems with real folders have this attribute
            files.auto_mkdir = True
        return files, path.rstrip("/")

    @property
    def _files(self) -> Any:
        return self._connected[0]

    @property
    def _root(self) -> str:
        return self._connected[1]

    def names(self) -> list[str]:
        """Return the names of checkpoints, complete or not, newest first."""
        try:
            entries = self._files.ls(self._root, detail=False)
        except FileNotFoundError:  # nothing has been uploaded yet
            return []
        names = {str(entry).rstrip("/").rpartition("/")[2] for entry in entries}
        return sorted(
            (name for name in names if step_of(name) is not None),
            key=_step,
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

    def partial(self) -> set[str]:
        """Return the names of checkpoints whose upload ended before the manifest."""
        found: dict[str, set[str]] = {}
        for entry in self._files.find(self._root):
            name, _, file = str(entry).removeprefix(f"{self._root}/").partition("/")
            if step_of(name) is not None:
                found.setdefault(name, set()).add(file)
        return {name for name, files in found.items() if not files & {MANIFEST, _ABANDONED}}

    def upload(self, file: Path, name: str, file_name: str) -> None:
        """Upload a file of a checkpoint."""
        self._files.put_file(str(file), self._path(name, file_name))

    def download(self, name: str, file_name: str, folder: Path) -> None:
        """Download a file of a checkpoint into an existing local folder."""
        local = folder / file_name
        for parent in reversed(Path(file_name).parents[:-1]):
            (folder / parent).mkdir(exist_ok=True)
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
        root: The folder. Its checkpoints of `run_id` that are not complete at `remote` are
            uploaded.
        remote: The destination.
        run_id: The run; checkpoints of other runs are not uploaded, removed or replaced.
        step: The update at which the run starts. Remote checkpoints of the run that are later
            belong to an abandoned branch; their manifests are renamed. Files of killed uploads are
            removed.
    """

    def __init__(self, root: Path, remote: Remote, run_id: str, step: int) -> None:
        self._root, self._remote, self._run_id = root, remote, run_id
        self._changed = threading.Condition()
        self._waiting = {path.name for path in committed(root) if run_id_of(path) == run_id}
        self._newest = max(map(_step, self._waiting), default=step)  # the newest local one
        self._complete = -1  # the newest one known to be completely uploaded
        self._obsolete: dict[str, int] = {}  # name: step of the newest checkpoint when displaced
        self._step: int | None = step
        self._sent: set[tuple[str, str, str]] = set()  # name, file and hash of uploaded files
        self._deadline: float | None = None
        self._failing: set[bool] = set()  # what fails: removals (True), uploads (False)
        self._thread = threading.Thread(target=self._run, name="cadence-mirror", daemon=True)
        self._thread.start()

    def committed(self, path: Path, displaced: Iterable[Path] = ()) -> None:
        """Upload a committed checkpoint, then remove the checkpoints that it displaces."""
        with self._changed:
            self._obsolete.pop(path.name, None)
            self._waiting.add(path.name)
            self._newest = max(self._newest, _step(path.name))
            self._changed.notify()
        self.remove(displaced)

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove checkpoints once the newest one is completely uploaded."""
        names = {path.name for path in paths if path.parent == self._root}
        with self._changed:
            self._waiting -= names
            self._obsolete.update(dict.fromkeys(names, self._newest))
            self._changed.notify()

    def finish(self, seconds: float) -> bool:
        """Let the thread end when everything is uploaded, or the service fails for 30 seconds.

        Args:
            seconds: How long to wait for the thread.

        Returns:
            Whether the thread has ended.
        """
        with self._changed:
            asked, self._deadline = self._deadline, self._deadline or time.monotonic() + _PATIENCE
            self._changed.notify()
        self._thread.join(seconds)
        if asked is None and self._thread.is_alive():
            logger.warning("Waiting for the upload of checkpoints to %s.", self._remote.url)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Wait until the thread has ended (see `finish`), and log the remaining work."""
        while not self.finish(LOOKS):
            pass
        if left := sorted(self._waiting):
            logger.warning(
                "Uploading to %s failed: %s. The next fit with this project_dir uploads the "
                "checkpoints that still exist.",
                self._remote.url,
                ", ".join(left),
            )
        if self._obsolete:
            names = ", ".join(sorted(self._obsolete))
            logger.warning(
                "Outdated checkpoints could not be removed from %s: %s.", self._remote.url, names
            )

    def abandon(self) -> None:
        """Drop pending uploads and removals, because the process is about to end."""
        with self._changed:
            self._deadline = time.monotonic()
            self._waiting.clear()
            self._obsolete.clear()
            self._changed.notify()

    def _run(self) -> None:
        pause = 0.0
        while self._wait(pause):
            removes, work = self._next()
            try:
                work()
            except _OtherRunError as error:
                logger.error("%s No further checkpoints are uploaded there.", error)
                return
            except Exception as error:  # noqa: BLE001 - each file system has its own error types
                if removes not in self._failing:
                    self._warn(removes, error)
                self._failing.add(removes)
                pause = min(2 * pause or 1.0, _LONGEST_PAUSE)
            else:
                if removes in self._failing:
                    what = (
                        "Checkpoints can be removed from %s" if removes else "%s can be written to"
                    )
                    logger.warning(f"{what} again.", self._remote.url)
                self._failing.discard(removes)
                pause = 0.0

    def _warn(self, removes: bool, error: Exception) -> None:
        url, kept = self._remote.url, f"Checkpoints are kept in {self._root}"
        if removes:
            text = "Checkpoints cannot be removed from %s: %r. Removal is retried."
        else:
            text = f"%s cannot be written to: %r. {kept}, and the upload is retried."
        logger.warning(text, url, error)

    def _wait(self, pause: float) -> bool:
        """Wait for work, and after a failure also for `pause` seconds; return False to end."""
        with self._changed:
            if pause and not self._can_upload():
                left = pause if self._deadline is None else min(pause, 1.0)
                self._changed.wait_for(lambda: self._deadline or self._can_upload(), left)
                ended = self._deadline is not None and time.monotonic() > self._deadline
                if ended and not self._can_upload():
                    return False
            self._changed.wait_for(lambda: self._has_work() or self._deadline is not None)
            return self._has_work()

    def _can_upload(self) -> bool:
        return bool(self._waiting) and False not in self._failing

    def _has_work(self) -> bool:
        return self._step is not None or bool(self._waiting or self._obsolete)

    def _next(self) -> tuple[bool, Callable[[], None]]:
        """Return the next piece of work, and whether it removes a checkpoint.

        The newest is uploaded first. Checkpoints are removed as soon as allowed, even while others
        wait for upload, since new ones may be saved faster than they are uploaded.
        """
        if self._step is not None:
            return False, partial(self._leave_branch, self._step)
        with self._changed:
            newest = max(self._waiting, key=_step, default=None)
            obsolete = next(filter(self._may_be_removed, self._obsolete), None)
        # A service that refuses removals must not hold up the uploads.
        if obsolete is not None and not (newest and True in self._failing):
            return True, partial(self._remove, obsolete)
        assert newest is not None  # otherwise there would be no work
        return False, partial(self._upload, newest)

    def _may_be_removed(self, name: str) -> bool:
        displaced_at = self._obsolete[name]
        is_partial = any(sent[0] == name for sent in self._sent)
        return is_partial or displaced_at <= self._complete or not self._waiting

    def _leave_branch(self, step: int) -> None:
        killed = self._remote.partial()
        for name, manifest in self._remote.complete():
            self._check_ours(name, manifest)
            if _step(name) <= step:
                self._complete = _step(name)
                with self._changed:  # only now is the URL known to belong to this run
                    self._obsolete.update(dict.fromkeys(killed - self._waiting, self._complete))
                break
            self._remote.abandon(name)
        self._step = None

    def _remove(self, name: str) -> None:
        manifest = self._remote.manifest(name)
        if manifest is None or manifest.get("run_id") == self._run_id:
            self._remote.remove(name)
        self._forget_sent(name)
        with self._changed:
            self._obsolete.pop(name, None)

    def _forget_sent(self, name: str) -> None:
        self._sent = {sent for sent in self._sent if sent[0] != name}

    def _upload(self, name: str) -> None:
        with self._changed:
            self._waiting.discard(name)
        if (links := link_files(self._root / name)) is None:
            return  # the save that replaced it calls `committed` again
        try:
            manifest = read_manifest(links)
            there = self._remote.manifest(name)
            if there != manifest:
                if there is not None:
                    self._check_ours(name, there)
                    self._remote.abandon(name)
                self._upload_files(links, name, manifest["files"])
        except Exception:
            with self._changed:
                self._waiting |= {name} - self._obsolete.keys()
            raise
        finally:
            discard(links)
        self._forget_sent(name)
        self._complete = max(self._complete, _step(name))

    def _upload_files(self, links: Path, name: str, files: Mapping[str, Any]) -> None:
        for file, described in files.items():
            sent = (name, file, described["sha256"])
            if sent not in self._sent:  # otherwise uploaded by an attempt that failed later
                self._remote.upload(links / file, name, file)
                self._sent.add(sent)
        self._remote.upload(links / MANIFEST, name, MANIFEST)

    def _check_ours(self, name: str, manifest: Mapping[str, Any]) -> None:
        if manifest.get("run_id") != self._run_id:
            raise _OtherRunError(f"{self._remote.url}/{name} is a checkpoint of another run.")


class _OtherRunError(Exception):
    """The URL holds checkpoints of another run."""


def holds_any(url: str) -> bool:
    """Return whether a URL has a complete checkpoint; False, with a warning, if unknown."""
    try:
        return next(Remote(url).complete(), None) is not None
    except Exception as error:  # noqa: BLE001 - each file system has its own error types
        logger.warning("%s cannot be read: %r.", url, error)
        return False


def fetch(
    roots: Mapping[Path, str], state: Ranks, *, on_each_node: bool, sound: int | None = None
) -> bool:
    """Fetch checkpoints from mirrors that are newer than the local ones; collective.

    The newest is fetched first, so that a killed start does not leave only older ones. If there are
    no local checkpoints, the ten newest are fetched. Ranks that share a disk fetch each file once.

    Args:
        roots: The URL of each folder that has a mirror.
        state: The ranks.
        on_each_node: The machines share no disk: each machine fetches the checkpoints it lacks.
        sound: The step of the newest intact local checkpoint, -1 if there is none. Damaged later
            ones are fetched too. None does not verify the local ones.

    Returns:
        Whether any checkpoint was fetched, the same on all ranks.

    Raises:
        CheckpointError: A mirror cannot be read and there are no local checkpoints, or it holds
            checkpoints of another run. Raised on all ranks.
    """
    writes, fetched = is_writer_rank(state, on_each_node), False
    for root, url in roots.items():
        listed, lacking = _plan(root, url, state, writes, sound)
        for name in sorted(set().union(*lacking), key=_step, reverse=True):
            fetches = name in lacking[state.process_index]
            try:
                fetched |= _fetch(
                    root / name, url, listed[name], state, fetches=fetches, alone=on_each_node
                )
            except CheckpointError as error:  # raised on all ranks
                if not any(all_gather_object(bool(committed(root)))):
                    raise
                logger.warning("%s The checkpoints in %s are used.", error, root)
                break
    return fetched


def _plan(
    root: Path, url: str, state: Ranks, writes: bool, sound: int | None
) -> tuple[dict[str, dict[str, Any]], list[list[str]]]:
    """Return a mirror's manifests, and the names that each rank has to fetch; collective."""
    what = f"Looking for checkpoints at {url}"
    listed = run_on_all_ranks(
        what, lambda: _list(root, url) if state.is_main_process else {}, state
    )[0]

    def lacking() -> list[str]:
        here = {path.name for path in committed(root)}
        newest = max(map(_step, here), default=-1)
        if sound is not None:
            newest = min(newest, sound)
        later = [name for name in listed if _step(name) > newest]
        return [name for name in later if name not in here or not _is_sound(root / name)]

    return listed, run_on_all_ranks(what, lambda: lacking() if writes else [], state)


def _is_sound(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def _fetch(
    target: Path,
    url: str,
    manifest: Mapping[str, Any],
    state: Ranks,
    *,
    fetches: bool,
    alone: bool,
) -> bool:
    """Download a checkpoint, and commit it if its hashes match the manifest; collective.

    Args:
        target: The local path. An existing checkpoint there is damaged, and is renamed.
        url: The mirror.
        manifest: The manifest at the mirror.
        state: The ranks.
        fetches: Whether this is a writer rank that lacks the checkpoint.
        alone: A writer rank downloads all files; otherwise the ranks divide them.

    Returns:
        Whether it was committed on any rank.
    """
    what, files = f"Fetching {url}/{target.name}", manifest["files"]
    folders = run_on_all_ranks(what, lambda: open_staging(target) if fetches else None, state)
    staging = folders[state.process_index if alone else 0]
    share = (0, 1) if alone else (state.process_index, state.num_processes)

    def download() -> list[str]:
        if staging is None:
            return []
        if not staging.is_dir():
            raise CheckpointError(no_shared_disk(staging, 0))
        return _download(Remote(url), target.name, staging, files, share_of_files(files, *share))

    try:
        damaged = [name for names in run_on_all_ranks(what, download, state) for name in names]
    except CheckpointError:
        if fetches and staging is not None:
            discard(staging)
        raise

    def end() -> bool:
        if not fetches or staging is None:
            return False
        if damaged:
            discard(staging)
            logger.warning("%s/%s is not used: %s is damaged.", url, target.name, damaged[0])
            return False
        if target.exists():
            logger.warning("%s is damaged and was renamed to %s.", target, quarantine(target))
        commit(staging, target, fields_of(manifest), files)
        return True

    return any(run_on_all_ranks(what, end, state))


def _download(
    remote: Remote, name: str, folder: Path, files: Mapping[str, Any], names: Iterable[str]
) -> list[str]:
    """Download some files of a checkpoint; return the names of missing or damaged ones."""
    missing = []
    for file in names:
        try:
            remote.download(name, file, folder)
        except FileNotFoundError:
            missing.append(file)
    described = describe_files(folder, set(names) - set(missing))
    return missing + [file for file, found in described.items() if found != files[file]]


def _list(root: Path, url: str) -> dict[str, dict[str, Any]]:
    """Return the manifests of the newest complete checkpoints at a mirror, by name."""
    here = committed(root)
    try:
        listed = dict(islice(Remote(url).complete(), 1 if here else _AT_ONCE))
    except Exception as error:  # each file system has its own error types
        if here:
            logger.warning(
                "%s cannot be read: %r. The checkpoints in %s are used.", url, error, root
            )
            return {}
        raise CheckpointError(
            f"{url} cannot be read: {error!r}. There are no checkpoints in {root}, so it is "
            "unknown whether this run has earlier checkpoints"
        ) from error
    runs = {manifest.get("run_id") for manifest in listed.values()}
    runs |= {run_id_of(path) for path in here[-1:]}
    if len(runs - {None}) > 1:
        raise CheckpointError(
            f"{url} has checkpoints of several runs, or of a different run than {root}. Give "
            "each run a separate mirror"
        )
    return listed
