"""The reference holds every public name, and builds without a warning."""

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slamb_jax
from slamb_jax import recipes

ROOT = Path(__file__).parents[1]
PUBLIC = sorted(
    name
    for name, value in vars(slamb_jax).items()
    if not name.startswith("_") and not inspect.ismodule(value)
)
RECIPES = sorted(name for name in vars(recipes) if name.isupper() and name[0] != "_")


def test_all_public_names_are_in_the_reference():
    text = (ROOT / "docs" / "index.rst").read_text()
    listed = re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.M)
    assert sorted(listed) == sorted(PUBLIC + RECIPES)


@pytest.mark.parametrize("name", [n for n in PUBLIC if callable(getattr(slamb_jax, n))])
def test_public_names_are_documented(name):
    thing = getattr(slamb_jax, name)
    assert thing.__doc__, name
    assert not thing.__doc__.startswith(f"{name}("), "the words of dataclasses"
    if inspect.isfunction(thing):
        assert "Args:" in thing.__doc__
        assert ">>>" in thing.__doc__


@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="no sphinx")
def test_reference_builds(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"]
    done = subprocess.run(
        [*command, "docs", tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text()
    assert all(f'id="slamb_jax.{name}"' in page for name in PUBLIC)
