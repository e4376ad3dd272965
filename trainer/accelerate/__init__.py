"""The names of accelerate, for its scripts: ``from trainer.accelerate import Accelerator``.

Each module of accelerate is importable below this package (``trainer.accelerate.utils``), and each
of its names refers to Cadence's own object, looked up on first use (`table`). Unsupported names
raise an ``ImportError`` with the replacement. This package adds no behaviour.
"""

from typing import Any

from trainer.accelerate.modules import install
from trainer.accelerate.table import VERSION, value_of

__version__ = VERSION

install()


def __getattr__(name: str) -> Any:
    return value_of("", name)
