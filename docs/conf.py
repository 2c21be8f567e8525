"""Sphinx: the Markdown pages of this folder."""

project = "Paceline"
copyright = "Paceline's developers"
extensions = ["myst_parser"]
html_theme = "furo"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
