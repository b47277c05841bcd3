"""How Sphinx builds the documentation: ``sphinx-build -W docs build/docs``."""

import base64
import contextlib
import io
import json
import os
import pathlib
import sys

import chex
import jax
import optax
from sphinx.util.typing import stringify_annotation

import slamb_jax
import slamb_jax.command_line

project = "slamb_jax"
author = "the authors of slamb_jax"
copyright = "the authors of slamb_jax"
version = release = slamb_jax.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",  # a page for each symbol
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx-mathjax-offline",  # copies MathJax: the pages need no network
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks are stored with what they printed
templates_path = ["templates"]
exclude_patterns = ["templates"]
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_theme = "furo"
html_title = f"slamb_jax {release}"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"  # the text has shapes and ranges
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80  # longer: one argument a line
html_show_search_summary = False  # it needs a server; pages may be read from disk
nitpicky = True
nitpick_ignore_regex = [("py:class", ".*")]  # optax's and jax's are not here

# Sphinx imports the modules of the package by their public names.
for name in ("directions", "selections"):
    sys.modules[f"slamb_jax.{name}"] = getattr(slamb_jax, name)

# Unions by their names in the code; those that contain others come first.
ALIASES = {
    stringify_annotation(union, "smart"): name
    for union, name in (
        (optax.ScalarOrSchedule, "optax.ScalarOrSchedule"),
        (chex.ArrayTree, "chex.ArrayTree"),
        (jax.typing.DTypeLike, "DTypeLike"),
        (jax.typing.ArrayLike, "ArrayLike"),
        (slamb_jax._core.axes.AxisName, "AxisName"),
    )
}


def setup(app):
    app.connect("autodoc-process-signature", name_aliases)
    app.connect("builder-inited", write_gallery)
    app.connect("builder-inited", write_commands)
    app.connect("missing-reference", find_by_last_name)


def name_aliases(app, what, name, thing, options, signature, returns):
    """The signature and the return type, in which unions have their names."""
    texts = [signature or "", returns or ""]
    for union, alias in ALIASES.items():
        texts = [text.replace(union, alias) for text in texts]
    return tuple(text or None for text in texts)


def write_gallery(app):
    """A page of all notebooks: what each says first, and its first picture."""
    docs = pathlib.Path(app.srcdir)
    there = docs / "generated"
    there.mkdir(exist_ok=True)
    page = ["# Notebooks\n"]
    names = [path.stem for path in sorted(docs.glob("notebooks/*.ipynb"))]
    for name in names:
        cells = json.loads((docs / f"notebooks/{name}.ipynb").read_text())["cells"]
        title, _, text = "".join(cells[0]["source"]).partition("\n")
        outputs = [o.get("data", {}) for c in cells for o in c.get("outputs", [])]
        picture = next(data["image/png"] for data in outputs if "image/png" in data)
        (there / f"{name}.png").write_bytes(base64.b64decode(picture))
        links = f"{{doc}}`Read it <../notebooks/{name}>`"
        if repository := os.environ.get("GITHUB_REPOSITORY"):  # as Actions sets it
            file = f"{repository}/blob/main/notebooks/{name}.ipynb"
            links += (
                f", [Open in Colab](https://colab.research.google.com/github/{file})"
            )
        page.append(f"## {title.removeprefix('# ')}\n{text}\n")
        page.append(f"![{name}]({name}.png)\n\n{links}\n")
    rows = "\n".join(f"../notebooks/{name}" for name in names)
    page.append(f"```{{toctree}}\n:hidden:\n{rows}\n```\n")
    (there / "notebooks.md").write_text("\n".join(page))


def write_commands(app):
    """A page of what the command line says of itself."""
    os.environ["COLUMNS"] = "88"  # as wide as argparse writes
    page = ["# slamb-jax, on the command line\n"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        slamb_jax.command_line.main(["advise", "--help"])
    page.append(f"## slamb-jax advise\n\n```text\n{said.getvalue()}```\n")
    there = pathlib.Path(app.srcdir, "generated")
    there.mkdir(exist_ok=True)
    (there / "command_line.md").write_text("\n".join(page))


def find_by_last_name(app, env, node, text):
    """Finds :func:`slamb` or :class:`WireReport` in whatever namespace it is."""
    if node["refdomain"] != "py":
        return None
    domain, target, role = env.get_domain("py"), node["reftarget"], node["reftype"]
    kinds = domain.objtypes_for_role(role) or []
    found = [
        name
        for name, entry in domain.objects.items()
        if entry.objtype in kinds and name.endswith(f".{target}")
    ]
    if not found:
        return None
    name = min(found, key=len)  # the top level before others
    return domain.resolve_xref(env, node["refdoc"], app.builder, role, name, node, text)
