# SPDX-License-Identifier: MIT OR Apache-2.0
"""Settings of the documentation, and the table of settings of ferrodist, made from its Config."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import ferrodist
from ferrodist.config import Config, variable

project = "ferrodist"
author = "the ferrodist authors"
version = release = ferrodist.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"ferrodist {version}"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say what matters; the signatures stay readable
add_module_names = False


def settings_table() -> str:
    """Make the table of settings from the class that reads them."""
    rows = ["| variable | field | default | takes | what it does |", "|---|---|---|---|---|"]
    for setting in fields(Config):
        form, what = setting.metadata["form"].words, setting.metadata["what"]
        name = f"`{variable(setting.name)}` | `{setting.name}`"
        rows.append(f"| {name} | `{setting.default}` | {form} | {what} |")
    return "\n".join(rows) + "\n"


generated = Path(__file__).parent / "_generated"
generated.mkdir(exist_ok=True)
(generated / "settings.md").write_text(settings_table())
exclude_patterns.append("_generated")
