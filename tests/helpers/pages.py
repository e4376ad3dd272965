"""Parse HTML into a tree with the standard library's parser, for tests of pages."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser

VOID = {"meta", "input", "img"}


class Node:
    """An element: its tag, attributes and children, which are nodes and texts."""

    def __init__(self, tag: str, attributes: dict[str, str | None]) -> None:
        self.tag = tag
        self.attributes = attributes
        self.children: list[Node | str] = []

    def __getitem__(self, name: str) -> str | None:
        return self.attributes.get(name)

    @property
    def classes(self) -> list[str]:
        return (self["class"] or "").split()

    @property
    def text(self) -> str:
        return "".join(each if isinstance(each, str) else each.text for each in self.children)

    def all(self, tag: str | None = None, class_: str | None = None) -> list[Node]:
        """Return the elements below this one with a given tag, class, or both."""
        return [
            node
            for node in self.walk()
            if tag in (None, node.tag) and (class_ is None or class_ in node.classes)
        ]

    def walk(self) -> Iterator[Node]:
        for child in self.children:
            if isinstance(child, Node):
                yield child
                yield from child.walk()

    def rows(self) -> list[list[Node]]:
        """Return the cells of a table's body by row; one that spans rows is in each of them."""
        rows: list[list[Node]] = []
        spanning: Node | None = None
        left = 0
        for row in next(node for node in self.walk() if node.tag == "tbody").all("tr"):
            cells = [child for child in row.children if isinstance(child, Node)]
            if left:
                assert spanning is not None
                cells, left = [spanning, *cells], left - 1
            elif cells and cells[0]["rowspan"]:
                spanning, left = cells[0], int(cells[0]["rowspan"]) - 1
            rows.append(cells)
        return rows


class _Builder(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Node("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(html: str) -> Node:
    """Return the tree of a page; every element must be closed at the level that it was opened."""
    builder = _Builder()
    builder.feed(html)
    builder.close()
    assert builder.open == [builder.root], f"<{builder.open[-1].tag}> is not closed"
    return builder.root
