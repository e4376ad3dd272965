"""Settings of the documentation site; ``make docs`` builds it into build/docs."""

import logging
import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
warnings.filterwarnings("ignore", category=FutureWarning)  # of earlier names, which autodoc reads
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "extensions")]

from trainer._siblings import version as cadence_version  # noqa: E402 - needs the path

# For parsers and the kernels of notebooks: this environment's commands, and no network.
os.environ.update(  # noqa: TID251 - nothing of Cadence is read here
    {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # noqa: TID251
        "COLUMNS": "88",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": "~/.cache/huggingface",
    }
)

project = "Cadence"
version = release = cadence_version()
copyright = "the authors of Cadence. Apache-2.0"  # noqa: A001 - Sphinx names it

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "names",
    "source_files",
    "tables",
]
exclude_patterns = ["extensions"]
smartquotes = False  # options have two hyphens

# -- pages -----------------------------------------------------------------------------------------

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 4  # as GitHub makes them
nb_execution_mode = "force"
nb_execution_timeout = 300  # seconds a cell, on a busy machine
nb_ipywidgets_js = {}  # from a CDN; the notebooks have no widgets
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True

# -- the reference ---------------------------------------------------------------------------------

autodoc_default_options = {
    "members": True,
    "inherited-members": "Module,Protocol,BaseException,Enum,str",  # but for theirs
}
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
napoleon_use_rtype = False
napoleon_use_ivar = True  # attributes are documented once
default_role = "literal"  # extensions/names.py makes links of public names

# -- the theme -------------------------------------------------------------------------------------

html_theme = "furo"
if repository := os.environ.get("DOCS_REPOSITORY"):  # noqa: TID251 - not a setting of Cadence
    html_theme_options = {  # "Edit this page"
        "source_repository": repository,
        "source_branch": "main",
        "source_directory": "docs/",
    }
html_title = f"Cadence {release}"
templates_path = ["_templates"]
html_sidebars = {  # Furo's, and a choice of versions
    "**": [
        "sidebar/brand.html",
        "versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(ROOT / "docs" / "search_scorer.js")
html_copy_source = False
html_show_sourcelink = False
copybutton_exclude = ".linenos, .gp, .go"  # neither prompts nor output

logging.getLogger("trainer").setLevel(logging.ERROR)
