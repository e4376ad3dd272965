"""What the state classes have in common: one state for all instances, for reading only."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar


class Shared:
    """An object whose attributes are those of all instances of its class.

    It cannot be changed by assignment, is copied as itself, and comes out of a pickle as the state
    of the process that reads it. Where there is none (a worker that was spawned with a pickled
    object), it is a description of the process that it came from: nothing is started.
    """

    _shared_state: ClassVar[dict[str, Any]]
    _how_to_change: ClassVar[str]  # what a user who assigns to an attribute should do instead
    _key: ClassVar[str]  # an attribute that is there as soon as the state has been made
    _settable: ClassVar[frozenset[str]] = frozenset()

    @property
    def initialized(self) -> bool:
        """The shared state has been made."""
        return self._key in self.__dict__

    @classmethod
    def _documents(cls, name: str) -> bool:
        annotated = any(name in inspect.get_annotations(kind) for kind in cls.__mro__)
        return annotated or isinstance(getattr(cls, name, None), property)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._settable and not name.startswith("_") and self._documents(name):
            raise AttributeError(
                f"`{type(self).__name__}.{name}` is for reading and cannot be set to {value!r}. "
                f"{self._how_to_change}"
            )
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # Reached for names that are not there, and for properties that could not find theirs.
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
    """The live state of this process; without one, an object with these values of its own."""
    state = object.__new__(kind)
    live = kind._key in kind._shared_state
    object.__setattr__(state, "__dict__", kind._shared_state if live else dict(values))
    return state
