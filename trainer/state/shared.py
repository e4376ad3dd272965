"""The base of the state classes: one read-only state for all instances of a class."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar


class Shared:
    """An object that shares its attributes with all instances of its class.

    Its attributes cannot be assigned to, a deep copy is the object itself, and unpickling returns
    the state of the process that unpickles it. If that process has none (such as a worker spawned
    with a pickled object), the object describes the process that pickled it, and starts nothing.
    """

    _shared_state: ClassVar[dict[str, Any]]
    _how_to_change: ClassVar[str]  # what a user who assigns to an attribute should do instead
    _key: ClassVar[str]  # an attribute that exists once the state is initialised
    _settable: ClassVar[frozenset[str]] = frozenset()

    @property
    def initialized(self) -> bool:
        """Whether the shared state has been initialised."""
        return self._key in self.__dict__

    @classmethod
    def _documents(cls, name: str) -> bool:
        annotated = any(name in inspect.get_annotations(kind) for kind in cls.__mro__)
        return annotated or isinstance(getattr(cls, name, None), property)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._settable and not name.startswith("_") and self._documents(name):
            raise AttributeError(
                f"`{type(self).__name__}.{name}` is read-only and cannot be set to {value!r}. "
                f"{self._how_to_change}"
            )
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # Called for missing names, and for properties that read one.
        owner = type(self).__name__
        if self._documents(name):
            raise AttributeError(
                f"`{owner}` object has no attribute `{name}`. This happens if "
                f"`{owner}._reset_state()` was called and an `Accelerator` or `PartialState` was "
                "not initialised again."
            )
        raise AttributeError(f"{owner!r} object has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def _picklable(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (type(self), self._picklable())


def _revive(kind: type[Shared], values: Mapping[str, Any]) -> Shared:
    """Return the live state of this process or, without one, an object with these values."""
    state = object.__new__(kind)
    live = kind._key in kind._shared_state
    object.__setattr__(state, "__dict__", kind._shared_state if live else dict(values))
    return state
