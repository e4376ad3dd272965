"""The package ``lightning``: see `trainer.lightning.entering`."""

import sys

del sys.modules[__name__]

from trainer.lightning import enter_as  # noqa: E402 - raises if Lightning itself is imported

enter_as("lightning")
__import__(__name__)
