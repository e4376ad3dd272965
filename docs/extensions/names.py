"""Links to the reference wherever code names something public.

``Trainer.fit``, ``EarlyStopping("val/loss")`` and ``trainer.Trainer`` become links, on every page
and in every docstring, if the reference has the name.
"""

import re

from docutils import nodes
from sphinx.addnodes import desc_signature, pending_xref
from sphinx.application import Sphinx

PACKAGES = ("trainer", "callbacks", "trackers")


def link_names(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Make links of the inline code that names something in the reference."""
    objects = app.env.domains.python_domain.objects
    for literal in list(doctree.findall(nodes.literal)):
        inside = literal.parent
        while inside is not None and not isinstance(
            inside, (nodes.reference, pending_xref, nodes.title, desc_signature)
        ):
            inside = inside.parent
        match = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", literal.astext())
        if inside is not None or match is None:
            continue
        name = match[1]
        full = next(
            (
                each
                for each in (name, *(f"{package}.{name}" for package in PACKAGES))
                if each in objects and objects[each].objtype != "module"
            ),
            None,
        )
        if full is None:
            continue
        entry = objects[full]
        uri = app.builder.get_relative_uri(docname, entry.docname)
        link = nodes.reference("", "", internal=True, refuri=f"{uri}#{entry.node_id}")
        literal.replace_self(link)
        link += literal


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("doctree-resolved", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
