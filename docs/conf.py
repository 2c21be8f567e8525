"""Sphinx: the Markdown pages of this folder, and the reference from the docstrings."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE),
    str(HERE.parent / "src"),
]  # docstrings.py, pictures.py, and this checkout's package

project = "Paceline"
copyright = "Paceline's developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings", "pictures"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "Paceline"
html_static_path = ["_static"]
html_css_files = ["wide.css"]

default_role = "code"  # docstrings have names in single backticks, as Markdown has
python_maximum_signature_line_length = 88
add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
