"""The documents: their code runs, they name what is public, and they build."""

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import json
import pkgutil
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
LOADS = re.compile(r"<(?:script|link|img)[^>]*(?:src|href)=\"[^\"]*//")
CHECKER = doctest.OutputChecker()
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks_of(page):
    """The page's code blocks: language, text and first line."""
    text = page.read_text()
    return [
        (m[1], m[2], text.count("\n", 0, m.start()) + 2) for m in BLOCK.finditer(text)
    ]


def of_page(page, marks=()):
    return pytest.param(page, id=page.relative_to(ROOT).as_posix(), marks=marks)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "page",
    [
        of_page(page, () if page.name == "README.md" else pytest.mark.long)
        for page in PAGES
        if {"python", "console"} & {language for language, *_ in blocks_of(page)}
    ],
)
def test_code_of_a_page_runs(page, monkeypatch):
    """In order, as one program; a text block is what the code before it printed."""
    pytest.importorskip("flax", minversion="0.12")  # as the pages are written
    if page.stem == "trainers":
        warnings.simplefilter("default")  # its own code warns
        pytest.importorskip("tunix")  # too large for the environment of all tests
    if page.stem == "your_loop":  # as it says
        warnings.filterwarnings("ignore", ".*(batch_stats|norm).*which began the same")
    monkeypatch.chdir(ROOT)
    names, printed = {"__name__": "__main__"}, ""
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
                for command in text.replace("\\\n", " ").splitlines():
                    name, *arguments = shlex.split(command.removeprefix("$ "))
                    assert name == "slamb-jax", f"{command!r} would not be run"
                    command_line.main(arguments)
        printed = out.getvalue()


@pytest.mark.parametrize("page", [of_page(page) for page in PAGES])
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def public(module=slamb_jax):
    """The objects of ``__all__`` by name; those of its modules, too."""
    for name in getattr(module, "__all__", ()):
        thing = getattr(module, name)
        if inspect.ismodule(thing):
            yield from public(thing)
        else:
            yield name, thing


def listed():
    """The objects that Sphinx will find in the reference, all of them public."""
    for page in sorted((ROOT / "docs" / "reference").glob("*.rst")):
        module = None
        for kind, name in DIRECTIVE.findall(page.read_text()):
            if kind.endswith("module"):
                module = pkgutil.resolve_name(name)
            elif module:
                assert name in getattr(module, "__all__", [name])
                yield getattr(module, name)


def test_the_reference_has_each_public_name_and_state_once():
    states = [
        (name, x)
        for package in (slamb_jax.links, slamb_jax.wrappers)
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
        for name, x in vars(importlib.import_module(found.name)).items()
        if name.endswith("State") and not name.startswith("_")
    ]
    wanted = {id(x): name for name, x in [*public(), *states]}
    found = [id(x) for x in listed()]
    assert [name for x, name in wanted.items() if found.count(x) != 1] == []


@pytest.mark.parametrize(("name", "thing"), list(public()))
def test_public_names_are_documented(name, thing):
    assert thing.__doc__
    assert not thing.__doc__.startswith(f"{name}("), "the words of dataclasses"
    if inspect.isfunction(thing):
        assert "Args:" in thing.__doc__
        assert ">>>" in thing.__doc__


def test_benchmarks_and_examples_import_public_names():
    private = []
    for path in (*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("examples/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "module", None) or ""
            if name.split(".")[0] == "slamb_jax":
                module = importlib.import_module(name)
                ours = getattr(module, "__all__", [])
                private += [x.name for x in node.names if x.name not in ours]
    assert private == []


def test_each_module_has_its_tests_in_the_table():
    home = ROOT / "tests"
    table = (home / "README.md").read_text().split("## From a module to its tests")[1]
    rows = re.findall(r"^\| (`.*`) \| (`.*`) \|$", table, re.M)
    columns = (" ".join(column) for column in zip(*rows, strict=True))
    modules, files = (re.findall("`(.*?)`", column) for column in columns)
    package = ROOT / "slamb_jax"
    paths = [path for path in package.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(modules) == sorted(str(x.relative_to(package)) for x in paths)
    assert [name for name in files if not (home / name).exists()] == []


def test_the_version_is_that_of_the_changelog_and_the_citation():
    newest, cited = r"^## \[(\d.*?)\] - \d{4}", r"^version: (.*)$"
    for file, pattern in (("CHANGELOG.md", newest), ("CITATION.cff", cited)):
        found = re.search(pattern, (ROOT / file).read_text(), re.M)
        assert found[1] == slamb_jax.__version__


@pytest.mark.long
def test_documentation_builds_and_needs_no_network(tmp_path):
    pytest.importorskip("sphinx")
    programs.ended("-m", "sphinx", "-q", "-W", "--keep-going", "docs", tmp_path)
    for page in tmp_path.rglob("*.html"):
        assert not LOADS.findall(page.read_text()), page.name


notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.mark.long
@notebooks
def test_notebook_runs(path, tmp_path):
    """With a tenth of the steps, where it trains a network."""
    shorter = tmp_path / path.name
    text = path.read_text().replace("STEPS = 8, 8, 200", "STEPS = 8, 8, 20")
    shorter.write_text(text)
    quick = {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    programs.ended("-m", "jupyter", "execute", shorter, **quick)


@notebooks
def test_outputs_are_kept(path):
    cells = json.loads(path.read_text())["cells"]
    code = [c for c in cells if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in code] == list(range(1, len(code) + 1))
    outputs = [o for c in code for o in c["outputs"]]
    assert not any(o["output_type"] == "error" for o in outputs)
    assert any("image/png" in o.get("data", {}) for o in outputs)
