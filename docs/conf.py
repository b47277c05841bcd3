"""How Sphinx builds the documentation: ``sphinx-build -W docs build/docs``."""

import slamb_jax

project = "slamb_jax"
author = "the authors of slamb_jax"
version = release = slamb_jax.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx-mathjax-offline",  # copies MathJax: the pages need no network
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks are stored with what they printed
html_theme = "furo"
html_title = f"slamb_jax {release}"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them; the text has shapes and ranges
autodoc_preserve_defaults = True
nitpicky = True
nitpick_ignore_regex = [("py:class", ".*")]  # optax's and jax's are not here


def setup(app):
    app.connect("missing-reference", find_at_the_top)


def find_at_the_top(app, env, node, text):
    """Finds :func:`slamb` from every namespace, as docstrings write it."""
    if node["refdomain"] != "py" or node["reftarget"].startswith("slamb_jax."):
        return None
    name = f"slamb_jax.{node['reftarget']}"
    return env.get_domain("py").resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], name, node, text
    )
