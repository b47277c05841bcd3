"""Wrong uses of everything public: what is done, the error, and what it must say.

Each is ``(call, error, message)``: a function without arguments (or with a directory),
the type of the error, and a pattern that names the argument and the value.
"""

import functools
import inspect

from tests.wrong_uses.advice import ADVICE
from tests.wrong_uses.checkpoints import CHECKPOINTS
from tests.wrong_uses.commands import BYTE_LM, COMMANDS, CONFIGS
from tests.wrong_uses.links import LINKS, SHARDS
from tests.wrong_uses.replicas import REPLICAS
from tests.wrong_uses.settings import MADE
from tests.wrong_uses.trees import TREES


def everything():
    """All rows: ``(call, error, message)``."""
    rows = []
    for group in (MADE, SHARDS, LINKS, TREES, REPLICAS, ADVICE, CHECKPOINTS, CONFIGS):
        rows += [(call, ValueError, m) for call, m in group]
    return rows + [(call, SystemExit, m) for call, m in COMMANDS + BYTE_LM]


def takes_directory(call):
    return not isinstance(call, functools.partial) and bool(
        inspect.signature(call).parameters
    )
