"""Every wrong use of the tables gets its error, which names the argument and value.

A row is ``(call, message)``: a function without arguments (or with a directory), and a
pattern that names the argument and the value.
"""

import functools
import inspect
import re

import pytest

from tests.arguments import ARGUMENTS, PARAMS, WRONG, each_argument
from tests.jointspar.wrong_uses import JOINTSPAR
from tests.wrong_uses.advice import ADVICE
from tests.wrong_uses.checkpoints import CHECKPOINTS
from tests.wrong_uses.commands import BYTE_LM, COMMANDS, CONFIGS
from tests.wrong_uses.links import LINKS, RIGHT, SHARDS, TREES, WARNED
from tests.wrong_uses.replicas import REPLICAS
from tests.wrong_uses.settings import MADE

VALUES = MADE + SHARDS + LINKS + TREES + JOINTSPAR + REPLICAS + ADVICE
VALUES += CHECKPOINTS + CONFIGS
ALL = [(*row, ValueError) for row in VALUES]
ALL += [(*row, SystemExit) for row in COMMANDS + BYTE_LM]
ALL += [(*row, UserWarning) for row in WARNED]  # warnings are errors in the tests

# Names are the same in every process: without addresses of functions.
NAMES = [f"{i}-{re.sub('0x[0-9a-f]+', '', row[1])}" for i, row in enumerate(ALL)]


@pytest.mark.parametrize(("call", "message", "error"), ALL, ids=NAMES)
def test_wrong_use(call, message, error, tmp_path, capsys):
    made = isinstance(call, functools.partial)
    takes_directory = not made and inspect.signature(call).parameters
    with pytest.raises(error) as caught:
        call(tmp_path) if takes_directory else call()
    said = str(caught.value)
    if isinstance(caught.value, SystemExit):
        said += capsys.readouterr().err
        assert said.strip().count("\n") <= 1, said  # one line, no traceback
    assert re.search(message, said), said


@each_argument(WRONG)
def test_what_an_argument_must_not_be(make, name):
    """Of every public function that returns a transformation."""
    for said, values in WRONG[name].items():
        for value in values:
            message = f"^{name} must {said}.*, got {re.escape(repr(value))}"
            with pytest.raises(ValueError, match=message):
                make(**ARGUMENTS[make] | {name: value}).init(PARAMS)


@pytest.mark.parametrize("name", RIGHT)
def test_right_use(name):
    RIGHT[name]()
