"""How large the library is, and what an update goes through.

Run from the root of the repository: ``python -m tests.size``. Lines of code are those
with code on them: no docstrings, comments or blank lines. An update's files and
functions are those of the library that run while it is traced, comprehensions and
lambdas apart.
"""

import ast
import collections
import cProfile
import io
import pstats
import tokenize
from pathlib import Path

import jax
import jax.numpy as jnp

import slamb_jax
from tests.optimizers import flat_slamb

ROOT = Path(slamb_jax.__file__).parent
LIMITS = Path(__file__).with_suffix(".json")
SHAPES = {"w": (512, 512), "b": (512,), "v": (100, 200)}


def lines(path):
    """The lines of code of a file, and its comments."""
    source = path.read_text()
    docstrings, code, comments = set(), set(), 0
    for node in ast.walk(ast.parse(source)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            docstrings |= set(range(node.lineno, node.end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments += 1
        elif token.string.strip():  # else an end of a line, or its indentation
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings), comments


def lines_by_folder():
    """Lines of code and comments of each folder; of files beside them under ``.``."""
    code, comments = collections.Counter(), collections.Counter()
    for path in sorted(ROOT.rglob("*.py")):
        folder = path.relative_to(ROOT).parts[0] if path.parent != ROOT else "."
        counted = lines(path)
        code[folder] += counted[0]
        comments[folder] += counted[1]
    return code, comments


def longest_functions():
    """Functions by their lines, without docstrings and inner functions, longest first.

    A function's signature does not count.
    """
    lengths = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            body = node.body[1:] if ast.get_docstring(node) else node.body
            covered = {n for x in body for n in range(x.lineno, x.end_lineno + 1)}
            for inner in ast.walk(node):
                if inner is not node and isinstance(inner, ast.FunctionDef):
                    covered -= set(range(inner.lineno, inner.end_lineno + 1))
            lengths[f"{path.relative_to(ROOT)}:{node.name}"] = len(covered)
    return sorted(lengths.items(), key=lambda pair: -pair[1])


def walk(tx):
    """How many files and functions an update of four workers goes through."""
    params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    state = jax.eval_shape(tx.init, params)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((4, *x.shape), x.dtype), (params, state, params)
    )
    profile = cProfile.Profile()
    profile.runcall(jax.eval_shape, jax.vmap(tx.update, axis_name="data"), *args)
    found = {(file, name) for file, _, name in pstats.Stats(profile).stats}
    ours = {x for x in found if x[0].startswith(str(ROOT)) and x[1][0] != "<"}
    return {"files": len({file for file, _ in ours}), "functions": len(ours)}


def walks():
    """Of a default update, and of one of SLAMB as a flat chain."""
    paper = slamb_jax.Exchange.paper("data")
    return {
        "adamw": walk(slamb_jax.adamw(1e-3, slamb_jax.Exchange("data"))),
        "slamb, flat": walk(flat_slamb(6e-3, paper, b3=0.93, form="sum")),
    }


def main():
    code, comments = lines_by_folder()
    print(f"{'':14}{'lines of code':>14}{'comments to 100':>17}")
    for folder, count in sorted(code.items()):
        print(f"{folder:14}{count:14,}{100 * comments[folder] / count:17.1f}")
    print(f"{'all':14}{code.total():14,}{100 * comments.total() / code.total():17.1f}")
    for name, found in walks().items():
        print(name, *(f"{count} {what}" for what, count in found.items()), sep=", ")
    print("longest:", *(f"{n} {lines}" for n, lines in longest_functions()[:5]))


if __name__ == "__main__":
    main()
