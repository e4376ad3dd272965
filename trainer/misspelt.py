"""Hooks whose names were meant to be others: a method that nobody calls is a silent mistake."""

from __future__ import annotations

import difflib
import inspect
import logging
import re

logger = logging.getLogger(__name__)

_HOOK = re.compile(r"on_.*|.*_step|.*_dataloader|configure_.*|prepare_data|setup|teardown")
_LOADERS = [f"{phase}_dataloader" for phase in ("train", "val", "test", "predict")]
_ALIKE = 0.9  # of difflib's ratio: a letter or two


def tell_of_misspelt(owner: object, base: type) -> None:
    """Tell in the log of methods that are named almost like a hook which the user does not define.

    It is no error: a method may have any name, and be called by the user's own code.

    Args:
        owner: The user's module, callback or datamodule.
        base: The class whose hooks it may override.
    """
    own = [cls for cls in type(owner).__mro__ if cls not in base.__mro__]
    defined = {name for cls in own for name, value in vars(cls).items() if inspect.isroutine(value)}
    hooks = {*filter(_HOOK.fullmatch, dir(base)), *_LOADERS}
    open_ = hooks - defined
    for name in sorted(defined.difference(dir(base), hooks)):
        if near := difflib.get_close_matches(name, open_, 1, _ALIKE):
            logger.warning(
                "%s defines %s, which is no hook and is not called; did you mean %s?",
                type(owner).__name__,
                name,
                near[0],
            )
