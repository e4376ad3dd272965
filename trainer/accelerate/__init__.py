"""The names of accelerate, for its scripts: ``from trainer.accelerate import Accelerator``.

Each module of accelerate is importable below this package (``trainer.accelerate.utils``), and each
of its names is Cadence's own, looked up on first use (`table`). What is not here raises an
``ImportError`` that says what to use. Nothing here has behaviour of its own.
"""

from typing import Any

from trainer.accelerate.modules import install
from trainer.accelerate.table import VERSION, value_of

__version__ = VERSION

install()


def __getattr__(name: str) -> Any:
    return value_of("", name)
