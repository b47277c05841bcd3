"""The documents: their code runs, they name what is public, and they build."""

import contextlib
import doctest
import importlib
import inspect
import io
import json
import re
import shlex
import warnings

import pytest

import slamb_jax
from slamb_jax import command_line
from tests import programs
from tests.programs import ROOT

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
DIRECTIVE = re.compile(r"^(?:\.\. (\w+)::|  ) ([\w.]+)$", re.M)  # or a row
LOADS = re.compile(r"<(?:script|link|img)[^>]*(?:src|href)=\"([^\"]*)\"")
CHECKER = doctest.OutputChecker()
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NAMESPACES = ("", "directions", "jointspar", "selections", "wrappers")
LINKS = ("average", "decay", "lamb", "momentum", "scale_by_slamb")


def blocks_of(page):
    """The page's code blocks: language, text and first line."""
    text = page.read_text()
    return [
        (m[1], m[2], text[: m.start()].count("\n") + 2) for m in BLOCK.finditer(text)
    ]


def has_code(page):
    return any(language in ("python", "console") for language, *_ in blocks_of(page))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=page.relative_to(ROOT).as_posix(),
            marks=() if page.name == "README.md" else pytest.mark.long,
        )
        for page in PAGES
        if has_code(page)
    ],
)
def test_code_of_a_page_runs(page, monkeypatch):
    """In order, as one program; a text block is what the code before it printed."""
    pytest.importorskip("flax", minversion="0.12")  # as the pages are written
    if page.stem == "trainers":
        warnings.simplefilter("default")  # its own code warns
        pytest.importorskip("tunix")  # too large for the environment of all tests
    monkeypatch.chdir(ROOT)
    names = {"__name__": "__main__"}
    printed = ""
    for language, text, line in blocks_of(page):
        if language == "text":
            assert CHECKER.check_output(text, printed, FLAGS), f"line {line}\n{printed}"
            printed = ""
        if language not in ("python", "console"):
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            if language == "python":  # padded: a traceback has the page's lines
                code = "\n" * (line - 1) + text
                exec(compile(code, page, "exec", dont_inherit=True), names)
            else:
                run_commands(text)
        printed = out.getvalue()


def run_commands(text):
    for command in text.replace("\\\n", " ").splitlines():
        name, *arguments = shlex.split(command.removeprefix("$ "))
        assert name == "slamb-jax", f"{command!r} would not be run"
        command_line.main(arguments)


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def public(namespace):
    """The objects of a namespace by name."""
    module = importlib.import_module(f"slamb_jax.{namespace}".rstrip("."))
    found = {name: getattr(module, name) for name in module.__all__}
    return {n: x for n, x in found.items() if not inspect.ismodule(x)}


def listed(namespace):
    """The names that Sphinx will find in the reference, under that namespace."""
    module, names = "", set()
    for page in sorted((ROOT / "docs" / "reference").glob("*.rst")):
        for kind, name in DIRECTIVE.findall(page.read_text()):
            if kind.endswith("module"):
                module = name
            elif module == f"slamb_jax.{namespace}".rstrip("."):
                names.add(name)
    return names


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_all_public_names_are_in_the_reference(namespace):
    """Once: what is at the top level too is there only."""
    top = {id(x) for x in public("").values()} if namespace else set()
    assert {n for n, x in public(namespace).items() if id(x) not in top} == listed(
        namespace
    )


@pytest.mark.parametrize("link", LINKS)
def test_states_of_links_are_in_the_reference(link):
    names = vars(importlib.import_module(f"slamb_jax.{link}"))
    states = {n for n in names if n.endswith("State") and not n.startswith("_")}
    assert states <= listed(link)


@pytest.mark.parametrize("name", [n for n, x in public("").items() if callable(x)])
def test_public_names_are_documented(name):
    thing = getattr(slamb_jax, name)
    assert thing.__doc__, name
    assert not thing.__doc__.startswith(f"{name}("), "the words of dataclasses"
    if inspect.isfunction(thing):
        assert "Args:" in thing.__doc__
        assert ">>>" in thing.__doc__


@pytest.mark.long
def test_documentation_builds_and_needs_no_network(tmp_path):
    pytest.importorskip("sphinx")
    programs.ended("-m", "sphinx", "-q", "-W", "--keep-going", "docs", tmp_path)
    for page in tmp_path.rglob("*.html"):
        loaded = LOADS.findall(page.read_text())
        assert not [x for x in loaded if "//" in x], page.name


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    programs.ended(
        "-m", "jupyter", "execute", path, "--output", tmp_path / "executed",
        PYTHONPATH=str(programs.ROOT),
    )  # fmt: skip


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept(path):
    cells = json.loads(path.read_text())["cells"]
    code = [c for c in cells if c["cell_type"] == "code"]
    counts = [c["execution_count"] for c in code]
    assert counts == list(range(1, len(code) + 1))
    outputs = [o for c in code for o in c["outputs"]]
    assert not any(o["output_type"] == "error" for o in outputs)
    assert any("image/png" in o.get("data", {}) for o in outputs)
