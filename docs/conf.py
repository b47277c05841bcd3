"""How Sphinx builds the documentation: ``sphinx-build -W docs build/docs``."""

import slamb_jax

project = "slamb_jax"
author = "the authors of slamb_jax"
version = release = slamb_jax.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx-mathjax-offline",  # copies MathJax: the pages need no network
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"slamb_jax {release}"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them; the text has shapes and ranges
autodoc_preserve_defaults = True
