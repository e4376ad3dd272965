"""Resolve which checkpoint is meant, the same one on all ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from trainer.checkpoint.mirror import fetch, holds_any
from trainer.checkpoint.save import (
    CHECKPOINT,
    Ranks,
    is_writer_rank,
    raise_on_all_ranks,
    run_on_all_ranks,
    share_of,
    writer_rank_of,
)
from trainer.checkpoint.storage import (
    MANIFEST,
    NUMBERED,
    check_same_run,
    committed,
    is_newer,
    is_ours,
    locate,
    metrics_of,
    read_manifest,
    run_id_of,
    step_of,
    sweep,
    verify,
    without_manifest,
)
from trainer.configuration import ProjectConfiguration
from trainer.distributed.objects import all_gather_object, broadcast_object
from trainer.errors import CheckpointError, LaterReleaseError, module_logger
from trainer.files import absolute_path, with_home
from trainer.state import PartialState

logger = module_logger(__name__)

WORDS = ("auto", "best", "last")
_TO_EVALUATE = "To evaluate them, pass the path of one."
_TO_TRAIN = (
    "Start a new run in another project_dir, with these weights if you wish "
    "(their path as ckpt_path). For a run that can be resumed, add a ModelCheckpoint without "
    "save_weights_only, with its own dirpath."
)

Check = Callable[..., object]
Listed = Mapping[int, tuple[Path, str | None]]  # paths and run ids by step or number


@dataclass(frozen=True, kw_only=True)
class CheckpointFolders:
    """The folders of a Trainer's checkpoints, and how a ``ckpt_path`` is resolved in them.

    Attributes:
        own: The folder of the Trainer.
        of_callbacks: Other folders that callbacks save to.
        monitors: Metric and mode of each callback that ranks checkpoints.
        lasting: Whether later starts use the same folder, because the user gave its path.
        writes: False for a trial run, which writes no files.
        on_each_node: Whether each machine keeps its own checkpoints, because they share no disk.
        mirrors: The mirror's URL of each folder that has one.
        state: The ranks.
    """

    own: Path
    of_callbacks: Sequence[Path] = ()
    monitors: Sequence[tuple[str, str]] = ()
    lasting: bool = True
    writes: bool = True
    on_each_node: bool = False
    mirrors: Mapping[Path, str] = field(default_factory=dict)
    state: Ranks = field(default_factory=PartialState)

    def given(self, ckpt_path: Any) -> Any:
        """Return the user's ``ckpt_path``, with a relative path made absolute; collective.

        This happens early, since hooks may change the working directory later. Ranks may have
        different working directories, so the writer rank's path is used if it exists on this rank.

        Args:
            ckpt_path: The argument of `Trainer.fit`, `validate`, `test` or `predict`.

        Raises:
            TypeError: It is not None, a string or a path.
            ValueError: It is empty; or it is a word such as "auto" and there is no ``project_dir``,
                so that every start has a new folder.
        """
        choices = "it is None, the folder of a checkpoint, 'last', 'best' or 'auto'"
        if not isinstance(ckpt_path, (str, os.PathLike, type(None))):
            kind = type(ckpt_path).__name__
            raise TypeError(f"ckpt_path is {ckpt_path!r} of type {kind}; {choices}.")
        if ckpt_path == "":
            raise ValueError(f"ckpt_path is ''; {choices}.")
        # Rank 0 decides, since a rank with another working directory may not see the folder.
        may_have_any = self.lasting or broadcast_object(self.own.exists())
        if ckpt_path in WORDS and not may_have_any:
            raise ValueError(
                f"ckpt_path={ckpt_path!r} looks for checkpoints of an earlier start, but without "
                "project_dir each start creates a new folder. Pass Trainer(project_dir='runs/…')."
            )
        path = None
        if ckpt_path is not None and ckpt_path not in WORDS:
            path = absolute_path("ckpt_path", ckpt_path)
            if path.is_symlink():  # a concurrent save may redirect the link
                path = path.resolve()
        writer_rank = writer_rank_of(self.state, self.on_each_node)
        # On all ranks, since some may have received a word.
        of_writer = all_gather_object(path)[writer_rank]
        if path is None:
            return ckpt_path
        return of_writer if of_writer is not None and locate(of_writer).exists() else path

    def all_roots(self) -> list[Path]:
        """Return the checkpoint folders of the Trainer and of its callbacks, once each; collective.

        Ranks may have different working directories, so the paths of the writer rank are returned.
        Which folders are duplicates is decided by rank 0's paths.

        Raises:
            ValueError: Ranks have different numbers of folders; raised on all ranks.
        """
        roots = [(root, root.resolve()) for root in (self.own, *self.of_callbacks)]
        by_rank = all_gather_object(roots)
        if len(set(map(len, by_rank))) > 1:
            raise ValueError(
                "The number of ModelCheckpoint callbacks with dirpath differs between the "
                f"processes: {', '.join(str(len(of_rank) - 1) for of_rank in by_rank)}. Pass the "
                "same callbacks on all processes."
            )
        first_of = {resolved: n for n, (_, resolved) in reversed(list(enumerate(by_rank[0])))}
        writer_rank = writer_rank_of(self.state, self.on_each_node)
        return [by_rank[writer_rank][number][0] for number in sorted(first_of.values())]

    def choose(self, ckpt_path: Any, *, sweeps: bool = False) -> Path | None:
        """Resolve ``ckpt_path`` to a checkpoint, the same on all ranks; collective.

        Its files are verified: ranks that share a disk read each file once.

        Args:
            ckpt_path: None, a path, ``"last"``, ``"best"`` or ``"auto"``.
            sweeps: Whether to delete the staging folders of killed saves. True only for a fit: an
                evaluation may run at the same time as a training, whose save in progress it must
                not delete.

        Returns:
            The checkpoint's folder; None if `ckpt_path` is None, or "auto" finds none.

        Raises:
            CheckpointError: The path is no checkpoint, ``"last"`` or ``"best"`` finds none, a word
                matches only weights-only checkpoints, or the machines' checkpoints at the path are
                from different runs; or it is damaged.
            ValueError: ``"best"`` without a metric to rank by.
        """
        state, on_each_node, roots = self.state, self.on_each_node, self.all_roots()
        if sweeps and self.writes:
            is_writer = is_writer_rank(state, on_each_node)
            what = "Deleting the leftovers of killed saves"
            run_on_all_ranks(what, lambda: [sweep(r) for r in roots if is_writer], state)
        if ckpt_path is None:
            return None
        if ckpt_path == "best" or ckpt_path not in WORDS:
            if ckpt_path == "best" and self.writes:
                fetch(self.mirrors, state, on_each_node=on_each_node)
            best = self._best(roots) if ckpt_path == "best" else None
            path = _of_one_run(lambda: best or _existing(ckpt_path), state, on_each_node)
            share = share_of(state, on_each_node)
            run_on_all_ranks(
                f"Checking {path}",
                lambda: None if share is None else verify(path, share=share),
                state,
            )
            return path
        newest = self._newest(roots)
        if newest is None:
            advice = _TO_TRAIN if sweeps else _TO_EVALUATE
            _check_not_weights_only(roots, state, advice, on_each_node=on_each_node)
            if ckpt_path == "last":
                raise CheckpointError(
                    f"ckpt_path='last', but there is no checkpoint in {_all(roots)}."
                )
        return newest

    def _newest(self, roots: Sequence[Path]) -> Path | None:
        """Return the newest intact checkpoint in the folders or at their mirrors; collective."""
        state, on_each_node, newest = self.state, self.on_each_node, None
        if self.writes and self.mirrors:
            try:
                newest = _newest_in_any(roots, state, on_each_node)
            except LaterReleaseError:
                raise
            except CheckpointError:  # none is intact: a mirror may have one
                pass
            sound = -1 if newest is None else step_of(newest)
            fetched = fetch(self.mirrors, state, on_each_node=on_each_node, sound=sound)
            if newest is not None and not fetched:
                return newest
        return _newest_in_any(roots, state, on_each_node)

    def _best(self, roots: Sequence[Path]) -> Path:
        if not self.monitors:
            raise ValueError(
                "ckpt_path='best', but no ModelCheckpoint has a monitor: pass one, as in "
                "ModelCheckpoint(monitor='val/loss')."
            )
        monitor, mode = self.monitors[0]
        is_writer = is_writer_rank(self.state, self.on_each_node)
        of_ranks = run_on_all_ranks(
            "Choosing the best checkpoint",
            lambda: [_scores_in(root, monitor) for root in roots] if is_writer else None,
            self.state,
        )
        of_machines = [scores_by_root for scores_by_root in of_ranks if scores_by_root is not None]
        scores: dict[Path, float] = {
            root / name: value
            for root, first, *others in zip(roots, *of_machines, strict=True)
            for name, value in first.items()
            if all(name in other for other in others)
        }
        if not scores:
            raise CheckpointError(
                f"ckpt_path='best', but no checkpoint in {_all(roots)} has a value of {monitor!r}."
            )
        by_age = sorted(scores, key=lambda path: step_of(path) or 0)  # the oldest of equal scores
        sign = 1 if mode == "min" else -1
        return min(by_age, key=lambda path: sign * scores[path])

    def check_fresh(self) -> None:
        """Raise if a new run would start in a folder with another run's checkpoints; collective.

        Raises:
            ValueError: A folder has checkpoints.
        """
        looks = is_writer_rank(self.state, self.on_each_node)
        own_roots: list[Path | str] = [r for r in self.all_roots() if looks and committed(r)]
        if self.state.is_main_process and self.writes:
            own_roots += [url for url in self.mirrors.values() if holds_any(url)]
        taken = [root for of_rank in all_gather_object(own_roots) for root in of_rank]
        if taken and self.writes:
            raise ValueError(
                f"{taken[0]} has the checkpoints of another run. To resume it, pass "
                "fit(ckpt_path='auto'); to start a new one, give another project_dir"
                f"{' and mirror' if self.mirrors else ''}."
            )

    def check_branch(self, chosen: Path) -> None:
        """Raise if the folders hold checkpoints of another run than the chosen one; collective.

        Args:
            chosen: The checkpoint to resume from.

        Raises:
            CheckpointError: The checkpoint cannot be read.
            ValueError: There are checkpoints of another run.
        """
        roots = [self.own, *self.of_callbacks]
        looks = self.writes and is_writer_rank(self.state, self.on_each_node)
        raise_on_all_ranks(lambda: check_same_run(chosen, roots), self.state, here=looks)


def may_rewind(ckpt_path: Any) -> bool:
    """Return whether checkpoints later than the requested one can exist."""
    return ckpt_path not in ("auto", "last")


def newest_sound(
    root: Path,
    state: Ranks,
    *,
    list_: Callable[[], Listed] | None = None,
    check: Check = verify,
    on_each_node: bool = False,
    operation: str = CHECKPOINT,
) -> Path | None:
    """Return the newest intact checkpoint in a folder, the same on all ranks; collective.

    The checkpoints are read in full and verified, newest first, until one is intact; ranks that
    share a disk read each file once. If each
    machine has its own disk, it must be intact on all of them. A damaged one is skipped with a
    warning. A checkpoint of a later release is an error and is not skipped, because resuming from
    an older one would discard training. Call :func:`trainer.checkpoint.storage.sweep` first.

    Args:
        root: The folder of checkpoints.
        state: The ranks.
        list_: Returns the checkpoints on this rank's disk by number; by default those with step
            names, without those of weights only.
        check: Called as ``check(path, share=share)`` on all ranks that share a disk; raises a
            CheckpointError if the checkpoint is damaged or malformed. See `verify`.
        on_each_node: The machines share no disk.
        operation: See :func:`trainer.checkpoint.save.run_on_all_ranks`.

    Returns:
        The checkpoint's path on the disk of this rank's writer rank; None if there are none.

    Raises:
        CheckpointError: If there are checkpoints but none is intact, since starting from scratch
            would discard a run; raised on every rank.
        LaterReleaseError: If a later release wrote a newer checkpoint; raised on every rank.
    """
    is_writer, what = is_writer_rank(state, on_each_node), f"Choosing a checkpoint in {root}"
    share = share_of(state, on_each_node)
    list_here = list_ or (lambda: _by_step(root))
    first = writer_rank_of(state, on_each_node, operation=operation)
    listings = run_on_all_ranks(
        what, lambda: list_here() if is_writer else None, state, operation=operation
    )
    listed = {rank: listing for rank, listing in enumerate(listings) if listing is not None}
    numbers = set[int]().union(*listed.values())
    for number in sorted(numbers, reverse=True):
        if problem := _difference(number, listed):
            if state.is_main_process:
                path, _ = next(listing[number] for listing in listed.values() if number in listing)
                logger.warning("%s is not used: %s.", path, problem)
            continue
        path, _ = listed[first][number]  # the writer rank's path: working directories may differ
        verdicts = run_on_all_ranks(
            what,
            lambda: None if share is None else _verdict(path, check, share),  # noqa: B023 - called at once
            state,
            operation=operation,
        )
        on_this_disk = [verdicts[state.process_index]] if on_each_node else verdicts
        if is_writer and (damages := [v.text for v in on_this_disk if v and v.damaged]):
            logger.warning("%s is not used: %s", path, damages[0])
        if later := [verdict for verdict in verdicts if verdict and not verdict.damaged]:
            raise LaterReleaseError(
                f"{what} failed: {later[0].text} To resume from an older checkpoint anyway, pass "
                "its path."
            )
        if not any(verdicts):
            return path
    if numbers:
        several = len(listed) > 1
        raise CheckpointError(
            f"{what} failed: none of the {len(numbers)} checkpoints is "
            f"intact{' on every machine' if several else ''} (the log says what is wrong with "
            f"each). {'Copy one to the machines that lack it, or move' if several else 'Move'} "
            "them away to start a new run."
        )
    return None


def _by_step(root: Path) -> Listed:
    for path in without_manifest(root):
        logger.warning("%s is not used: it has no manifest.json, so it is damaged.", path)
    checkpoints = [path for path in committed(root) if not holds_weights_only(path)]
    return {step_of(path) or 0: (path, run_id_of(path)) for path in checkpoints}


def holds_weights_only(path: Path) -> bool:
    """Return whether a checkpoint holds only weights, so that no run can resume from it."""
    try:
        return bool(read_manifest(path).get("weights_only", False))
    except CheckpointError:
        return False  # damaged, which is reported when it is used


def _check_not_weights_only(
    roots: Iterable[Path], state: Ranks, advice: str, *, on_each_node: bool
) -> None:
    """Raise if there are only weights-only checkpoints; call it if no full one exists."""

    def find() -> list[Path]:
        if not is_writer_rank(state, on_each_node):
            return []
        return [path for root in roots for path in committed(root) if holds_weights_only(path)]

    lists = run_on_all_ranks("Looking for checkpoints", find, state)
    if weights_only := [path for paths in lists for path in paths]:
        raise CheckpointError(
            f"{weights_only[-1]} holds only weights (save_weights_only=True), as do all others "
            f"in its folder; no run can be resumed from them. {advice}"
        )


def _difference(number: int, listed: Mapping[int, Listed]) -> str | None:
    """Return how a checkpoint differs between the disks; None if it is the same on all.

    Args:
        number: The checkpoint's step or number.
        listed: The checkpoints on the disk of each writer rank.
    """
    if lacking := [str(rank) for rank, listing in listed.items() if number not in listing]:
        return f"the machine of rank {', '.join(lacking)} does not have it"
    runs = {rank: listing[number][1] for rank, listing in listed.items()}
    if len(set(runs.values()) - {None}) > 1:  # None: damaged, so its run is unknown
        return f"the machines have it from different runs ({_listing(runs)})"
    return None


def _listing(runs: Mapping[int, str | None]) -> str:
    return ", ".join(f"that of rank {rank} from {run_id}" for rank, run_id in runs.items())


class _Verdict(NamedTuple):
    """The reason why a checkpoint is not used."""

    text: str
    damaged: bool  # False: a later release wrote it


def _verdict(path: Path, check: Check, share: tuple[int, int]) -> _Verdict | None:
    """Return why a checkpoint cannot be used; None if this rank's share of it is intact."""
    try:
        check(path, share=share)
    except CheckpointError as error:
        return _Verdict(str(error), damaged=not is_newer(path))
    return None


def _of_one_run(choose_here: Callable[[], Path], state: Ranks, on_each_node: bool) -> Path:
    """Return this rank's choice, and check that all machines chose the same run."""
    if state.num_processes == 1:
        return choose_here()

    def look() -> tuple[Path, str | None]:
        path = choose_here()
        return path, run_id_of(path) if is_writer_rank(state, on_each_node) else None

    choices = run_on_all_ranks("Choosing a checkpoint", look, state)
    runs = {rank: run_id for rank, (_, run_id) in enumerate(choices) if run_id is not None}
    path = choices[state.process_index][0]
    if len(set(runs.values())) > 1:
        raise CheckpointError(
            f"The machines have {path} from different runs ({_listing(runs)}). Copy one of them to "
            "all."
        )
    return path


def _newest_in_any(roots: Sequence[Path], state: Ranks, on_each_node: bool) -> Path | None:
    newest, refused = [], []
    for root in roots:
        try:
            newest.append(newest_sound(root, state, on_each_node=on_each_node))
        except LaterReleaseError:  # do not fall back to a checkpoint that may be older
            raise
        except CheckpointError as error:  # raised on all ranks
            refused.append(error)
    paths = [path for path in newest if path is not None]
    if not paths and refused:
        raise refused[0]
    for reason in refused:
        logger.warning("%s A checkpoint of another folder is used.", reason)
    return max(paths, key=lambda path: step_of(path) or 0, default=None)


def _scores_in(root: Path, monitor: str) -> dict[str, float]:
    """Return the finite values of a metric in the manifests of a folder, by checkpoint name."""
    scores = {}
    for path in committed(root):
        try:
            value = metrics_of(read_manifest(path)).get(monitor)
        except CheckpointError as error:
            logger.warning("%s is not used: %s", path, error)
            continue
        if value is not None and math.isfinite(value):
            scores[path.name] = value
    return scores


def _existing(ckpt_path: str | os.PathLike[str]) -> Path:
    path = Path(ckpt_path)
    if path.is_file() and not (path.parent / MANIFEST).exists():
        raise CheckpointError(
            f"ckpt_path is the file {path}; a checkpoint is a folder. Files such as .ckpt and "
            f".pt are pickles, which are never loaded: `trainer migrate {path}` converts a "
            "Lightning checkpoint; for other files, read the weights with the library that wrote "
            "them and load them with module.load_state_dict."
        )
    if path.is_file():
        raise CheckpointError(f"ckpt_path is the file {path}; give its folder, {path.parent}.")
    if newest := committed(path) or committed(path / "checkpoints"):
        what = "a folder of checkpoints" if newest[-1].parent == path else "the folder of a run"
        raise CheckpointError(
            f"ckpt_path is {path}, {what}; give one of its checkpoints, such as {newest[-1]}, or "
            "ckpt_path='auto' with its project_dir."
        )
    if not locate(path).exists():
        near = get_close_matches(path.name, WORDS, n=1) if path.parent == Path.cwd() else []
        raise CheckpointError(
            f"There is no checkpoint at {path}. ckpt_path must be None, the folder of a "
            f"checkpoint, or one of {', '.join(map(repr, WORDS))}."
            + "".join(f" Did you mean {word!r}?" for word in near)
        )
    return locate(path)


def _all(roots: Sequence[Path]) -> str:
    return ", ".join(map(str, roots))


# -- the numbered checkpoints of an Accelerator ----------------------------------------------------


def choose_state(
    input_dir: str | os.PathLike[str] | None,
    project: ProjectConfiguration,
    processes: Ranks,
    *,
    check: Check,
) -> tuple[Path, int | None]:
    """Return the folder that ``load_state`` loads; collective.

    Args:
        input_dir: The user's argument; None for the newest intact checkpoint of the project.
        project: The project.
        processes: The ranks.
        check: See :func:`newest_sound`.

    Returns:
        The folder, and the number of the next save; None keeps the current number.

    Raises:
        ValueError: There is no `input_dir` and no automatic naming.
        CheckpointError: The project has no checkpoint, or none that is intact on all machines.
    """
    naming = project.automatic_checkpoint_naming
    if input_dir is not None:
        target = Path(with_home("input_dir", input_dir))
        match = NUMBERED.fullmatch(target.name)
        if match is None or not naming or project.project_dir is None:
            return target, None
        ours = target.absolute().parent == numbered_root(project).absolute()
        return target, int(match[1]) + 1 if ours else None
    if not naming:
        raise ValueError(
            "input_dir is None and automatic checkpoint naming is off. Pass the folder that "
            "save_state returned."
        )
    root = numbered_root(project)
    writes = is_writer_rank(processes, project.save_on_each_node)
    newest = newest_sound(
        root,
        processes,
        list_=lambda: {number: (path, None) for number, path in _numbered(root).items()},
        check=check,
        on_each_node=project.save_on_each_node,
        operation="load_state (choose)",
    )
    if newest is None:
        raise CheckpointError(
            f"{root} holds no checkpoint_<number>. Start without load_state(), or pass the folder "
            "to load."
        )
    numbers = run_on_all_ranks(
        "Numbering the checkpoints",
        lambda: max(_numbered(root)) if writes else 0,
        processes,
        operation="load_state (number)",
    )
    return newest, max(numbers) + 1


def number_of(path: Path) -> int:
    """Return the number in an automatic name."""
    match = NUMBERED.fullmatch(path.name)
    assert match is not None  # `path` has an automatic name
    return int(match[1])


def numbered_root(project: ProjectConfiguration) -> Path:
    """Return the folder of a project's numbered checkpoints.

    Raises:
        ValueError: The project has no folder.
    """
    if project.project_dir is None:
        raise ValueError(
            "Automatic checkpoint naming needs a project_dir; pass one to the Accelerator or to "
            "ProjectConfiguration."
        )
    return Path(with_home("project_dir", project.project_dir)) / "checkpoints"


def _numbered(root: Path) -> dict[int, Path]:
    """Return the project's numbered folders."""
    folders = root.iterdir() if root.is_dir() else ()
    return {int(match[1]): path for path in folders if (match := NUMBERED.fullmatch(path.name))}


def displaced_by(target: Path, limit: int | None) -> list[Path]:
    """Return the checkpoints that a save to ``target`` displaces: those with the lowest numbers.

    Raises:
        ValueError: A checkpoint with this or a higher number exists, from another run.
    """
    existing = _numbered(target.parent)
    ours_next = number_of(target)
    later = [path.name for number, path in sorted(existing.items()) if number >= ours_next]
    if later:
        raise ValueError(
            f"{target} is the next checkpoint, but {', '.join(later)} of another run exist "
            "already; nothing was saved or deleted. Call load_state() first to resume from them, "
            f"set accelerator.project_configuration.iteration to {max(existing) + 1} to continue "
            "their numbering, or choose another project_dir."
        )
    ours = [path for _, path in sorted(existing.items()) if is_ours(path)]
    return [] if limit is None else ours[: max(len(ours) + 1 - limit, 0)]
