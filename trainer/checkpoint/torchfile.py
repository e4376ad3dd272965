"""Files of ``torch.save``, read as data: tensors, arrays and plain values, never code."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from trainer.errors import CheckpointError


def read_torch_file(file: Path, *, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """What ``torch.save`` wrote, as long as it is tensors, arrays, plain values and containers.

    Args:
        file: The file.
        map_location: Where tensors are put, as for ``torch.load``.
        mmap: Leave tensors in the file until they are used; they must be copied before it goes.

    Raises:
        CheckpointError: If the file is missing or damaged, or holds anything else; the text names
            it.
    """
    try:
        mmap = mmap and zipfile.is_zipfile(file)  # files of torch before 1.6 cannot be mapped
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(  # noqa: TID251  # of other libraries or tools, and weights_only
                file, map_location=map_location, weights_only=True, mmap=mmap
            )
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing.") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} is not read: it is damaged, or holds objects besides tensors and plain "
            "values, and making those would run whatever code the file names. Load it where it "
            f"was written and save plain values instead. ({_first_lines(error)}.)"
        ) from error
    except Exception as error:  # damaged bytes raise whatever they lead to
        raise CheckpointError(f"{file} cannot be read: {_first_lines(error)}.") from error


def _first_lines(error: Exception) -> str:
    """The part of torch's text that says what was met, not how to switch the check off."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "Unsupported" in line or "GLOBAL" in line] or lines[:1]
    text = " ".join(told[:1]).partition(" was not an allowed")[0].rstrip(".")
    return text or type(error).__name__


def _numpy_globals() -> list[Any]:
    """What the pickle of a numpy array names, under the names of numpy 1 and 2."""
    import _codecs

    import numpy as np

    rebuild = np.empty(0).__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in "?bBhHiIlLqQfd"}
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")]
    return [*((rebuild, name) for name in names), np.ndarray, np.dtype, *dtypes, _codecs.encode]
