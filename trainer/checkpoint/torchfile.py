"""Read files of ``torch.save`` with ``weights_only``: tensors, arrays and plain values."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.manifest import check_file
from trainer.errors import CheckpointError


def read_torch_file(file: Path, *, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Read a file of ``torch.save`` that holds tensors, arrays, plain values and containers.

    Args:
        file: The file.
        map_location: The device of the tensors, as for ``torch.load``.
        mmap: Memory-map the tensors; they must be copied before the file is deleted.

    Raises:
        CheckpointError: If the file is missing or damaged, or holds anything else; the message
            names it.
    """
    check_file(file)
    try:
        mmap = mmap and zipfile.is_zipfile(file)  # files of torch before 1.6 cannot be mapped
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(  # noqa: TID251  # for files of other tools, with weights_only
                file, map_location=map_location, weights_only=True, mmap=mmap
            )
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing.") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} is not read: it is damaged, or holds objects besides tensors and plain "
            "values, and creating those would run whatever code the file names. Load it where it "
            f"was written and save plain values instead. ({_first_lines(error)}.)"
        ) from error
    except Exception as error:  # damaged bytes can raise anything
        raise CheckpointError(f"{file} cannot be read: {_first_lines(error)}.") from error


def _first_lines(error: Exception) -> str:
    """Return the part of torch's message that names the problem, without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "Unsupported" in line or "GLOBAL" in line] or lines[:1]
    text = " ".join(told[:1]).partition(" was not an allowed")[0].rstrip(".")
    return text or type(error).__name__


def _numpy_globals() -> list[Any]:
    """Return the safe globals for unpickling numpy arrays, by their names in numpy 1 and 2."""
    import _codecs

    import numpy as np

    rebuild = np.empty(0).__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in "?bBhHiIlLqQfd"}
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")]
    return [*((rebuild, name) for name in names), np.ndarray, np.dtype, *dtypes, _codecs.encode]
