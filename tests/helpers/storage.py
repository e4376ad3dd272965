"""A file system of fsspec in a folder of this machine, that does what a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

Rule = Callable[[str, str], object]


class Storage(LocalFileSystem):
    """The file system of ``storage://``, such as ``storage:///tmp/bucket``.

    Attributes:
        rule: Called before each request with its kind ("connect", "put", "get", "ls", "rm") and its
            path; may raise or wait.
    """

    protocol = "storage"
    rule: ClassVar[Rule] = staticmethod(lambda kind, path: None)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        type(self).rule("connect", "")

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("storage://"))

    def put_file(self, lpath: Any, rpath: Any, **options: Any) -> None:
        type(self).rule("put", rpath)
        super().put_file(lpath, rpath, **options)

    def get_file(self, rpath: Any, lpath: Any, **options: Any) -> None:
        type(self).rule("get", rpath)
        super().get_file(rpath, lpath, **options)

    def ls(self, path: Any, **options: Any) -> Any:
        type(self).rule("ls", path)
        return super().ls(path, **options)

    def rm_file(self, path: Any) -> None:
        type(self).rule("rm", path)
        super().rm_file(path)

    def rm(self, path: Any, **options: Any) -> None:
        type(self).rule("rm", path)
        super().rm(path, **options)


@contextmanager
def following(rule: Rule) -> Iterator[None]:
    """Let the storage follow a rule inside."""
    before, Storage.rule = Storage.rule, staticmethod(rule)
    try:
        yield
    finally:
        Storage.rule = before


fsspec.register_implementation("storage", Storage, clobber=True)
