"""How Sphinx builds the API reference: ``sphinx-build -W docs build/docs``."""

import slamb_jax

project = "slamb_jax"
author = "the authors of slamb_jax"
version = release = slamb_jax.__version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
html_theme = "furo"
html_title = f"slamb_jax {release}"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them; the text has shapes and ranges
autodoc_preserve_defaults = True
