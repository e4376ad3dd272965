"""Misspelt hook names: a method that nobody calls is a silent mistake."""

from __future__ import annotations

import difflib
import inspect
import re

from trainer.errors import module_logger

logger = module_logger(__name__)

_HOOK = re.compile(r"on_.*|.*_step|.*_dataloader|configure_.*|prepare_data|setup|teardown")
_LOADERS = [f"{phase}_dataloader" for phase in ("train", "val", "test", "predict")]
_OTHER_WORDS = {r"_begin$": "_start", r"(?<![a-z])val_(?!dataloader)": "validation_"}
_ALIKE = 0.9  # difflib's ratio for names that differ by a letter or two


def check_hook_typos(owner: object, base: type) -> None:
    """Log a warning for methods named almost like a hook that the user does not define.

    This is not an error: a method may have any name and be called by the user's own code.

    Args:
        owner: The user's module, callback or datamodule.
        base: The class whose hooks it may override.
    """
    own = [cls for cls in type(owner).__mro__ if cls not in base.__mro__]
    members = [getattr(owner, "__dict__", {}), *map(vars, own)]
    defined = {name for each in members for name, value in each.items() if inspect.isroutine(value)}
    hooks = {*filter(_HOOK.fullmatch, dir(base)), *_LOADERS}
    open_ = hooks - defined
    for name in sorted(defined.difference(dir(base), hooks)):
        spelt = name
        for others, ours in _OTHER_WORDS.items():
            spelt = re.sub(others, ours, spelt)
        spellings = (difflib.get_close_matches(each, open_, 1, _ALIKE) for each in (name, spelt))
        near = next(filter(None, spellings), None)
        if near:
            logger.warning(
                "%s defines %s, which is not a hook, so the Trainer never calls it; "
                "did you mean %s?",
                type(owner).__name__,
                name,
                near[0],
            )
