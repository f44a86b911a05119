"""The site: `make docs` builds it into docs/_build/html; every warning is an error."""

import sys
from pathlib import Path

import nbflash

sys.path.insert(0, str(Path(__file__).parent))  # gallery

project = "nbflash"
copyright = "the nbflash developers"
version = release = nbflash.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "myst_parser",
    "gallery",
]
exclude_patterns = ["_build"]
nitpicky = True
nitpick_ignore = [("py:obj", name) for name in sys.stdlib_module_names]

# `name` is a link where it names something that can be imported, else emphasis.
default_role = "autolink"
autosummary_generate = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"nbflash {release}"
html_copy_source = False
html_show_sphinx = False
