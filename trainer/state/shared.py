"""Base class of the state classes: all instances of a class share one read-only state."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar


class Shared:
    """An object that shares its attributes with all instances of its class (a Borg singleton).

    Documented attributes are read-only. A deep copy is the object itself. Unpickling gives the
    state of the process that unpickles it. If that process has no state (a spawned worker, for
    example), the object has the values of the process that pickled it, and initializes nothing.
    """

    _shared_state: ClassVar[dict[str, Any]]
    _how_to_change: ClassVar[str]  # for the error: what to do instead of assigning an attribute
    _key: ClassVar[str]  # the name of an attribute that exists once the state is initialised
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
        # Called for a missing attribute, and for a property that reads a missing attribute.
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
    """Unpickle a state: return this process's own state or, without one, the pickled values."""
    state = object.__new__(kind)
    live = kind._key in kind._shared_state
    object.__setattr__(state, "__dict__", kind._shared_state if live else dict(values))
    return state
