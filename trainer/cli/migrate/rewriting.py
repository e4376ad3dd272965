"""Rewrites the import lines of programs, and nothing else; formatting is kept."""

from __future__ import annotations

from typing import Any

import libcst as cst

from trainer.cli.migrate.names import dotted, is_module, moved, package_of


class _Imports(cst.CSTTransformer):
    """Changes the import lines to those of `trainer.lightning` and `trainer.accelerate`."""

    def leave_ImportFrom(
        self,
        original_node: cst.ImportFrom,  # noqa: ARG002 - as libcst calls it
        updated_node: cst.ImportFrom,
    ) -> cst.ImportFrom:
        if updated_node.relative:
            return updated_node
        path = dotted(updated_node.module)
        if (new := moved(path)) == path or not is_module(new):
            return updated_node
        return updated_node.with_changes(module=_name(new))

    def leave_Import(
        self,
        original_node: cst.Import,  # noqa: ARG002 - as above
        updated_node: cst.Import,
    ) -> cst.Import:
        return updated_node.with_changes(names=[*map(_moved_alias, updated_node.names)])


def _moved_alias(alias: cst.ImportAlias) -> cst.ImportAlias:
    path = dotted(alias.name)
    package = package_of(path)
    if package is None or (new := moved(path)) == path:
        return alias
    if alias.asname is not None:
        return alias.with_changes(name=_name(new)) if is_module(new) else alias
    if "." in package:
        return alias  # its uses would have to change too
    return alias.with_changes(name=_name(moved(package)), asname=cst.AsName(cst.Name(package)))


def _name(path: str) -> Any:
    return cst.parse_expression(path)


def with_imports(module: cst.Module) -> cst.Module:
    """Return a program with its import lines changed."""
    return module.visit(_Imports())
