# SPDX-License-Identifier: MIT OR Apache-2.0
"""Settings of the documentation."""

from __future__ import annotations

import ferrodist

project = "ferrodist"
author = "the ferrodist authors"
version = release = ferrodist.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"ferrodist {version}"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_mock_imports = ["torch"]  # DDP is described also where there is no torch
autodoc_typehints = "none"  # the docstrings say what matters; the signatures stay readable
add_module_names = False
