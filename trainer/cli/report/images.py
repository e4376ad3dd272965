"""Read the images in TensorBoard's files, with its own reader if that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

Images: TypeAlias = "dict[str, dict[int, bytes]]"  # tag -> step -> PNG

_PNG = b"\x89PNG\r\n\x1a\n"
_HEAD = 24  # bytes up to the end of its size
_TAGS = 24
_STEPS = 4  # of each tag: the first and the latest
_LARGEST = 1_000_000  # bytes of one


def read_images(folder: Path, problems: list[str]) -> Images:
    """Return the images below a folder's ``logs``: of each tag the first and the latest ones.

    Args:
        folder: The folder of a run.
        problems: Receives messages about what is left out.
    """
    every = sorted((folder / "logs").rglob("events.out.tfevents.*"))
    files = [file for file in every if file.is_file()]
    if not files:
        return {}
    try:
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:
        problems.append(
            "Any images in TensorBoard's files are left out: tensorboard is not installed "
            "(pip install 'cadence-trainer[tensorboard]')."
        )
        return {}
    found: Images = {}
    large: set[str] = set()
    left_out: set[str] = set()
    for file in files:
        for raw in RawEventFileLoader(str(file)).Load():
            if _PNG not in raw:  # most are numbers, which metrics.jsonl has too
                continue
            for tag, step, image in _images_in(Event.FromString(raw)):
                if len(image) > _LARGEST:
                    large.add(tag)
                elif tag not in found and len(found) == _TAGS:
                    left_out.add(tag)
                else:
                    _keep(found.setdefault(tag, {}), step, image)
    if large:
        problems.append(f"Images of more than 1 MB are left out: {', '.join(sorted(large))}.")
    if left_out:
        problems.append(f"Images of {_TAGS} names are shown; {len(left_out)} more are left out.")
    return found


def _images_in(event: Any) -> Iterator[tuple[str, int, bytes]]:
    for value in event.summary.value:
        image = value.image.encoded_image_string  # empty where it is something else
        if image.startswith(_PNG) and len(image) >= _HEAD:
            yield value.tag, event.step, image


def _keep(steps: dict[int, bytes], step: int, image: bytes) -> None:
    """Add an image, replacing one of the same step; if there are too many, drop the second."""
    steps[step] = image
    if len(steps) > _STEPS:
        del steps[sorted(steps)[1]]
