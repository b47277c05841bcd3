"""Every wrong use of the table gets its error, which names the argument and value."""

import re

import pytest

from tests import wrong_uses

ALL = wrong_uses.everything()


@pytest.mark.parametrize(("call", "error", "message"), ALL)
def test_wrong_use(call, error, message, tmp_path, capsys):
    with pytest.raises(error) as caught:
        call(tmp_path) if wrong_uses.takes_directory(call) else call()
    said = str(caught.value)
    if isinstance(caught.value, SystemExit):
        said += capsys.readouterr().err
        assert said.strip().count("\n") <= 1, said  # one line, no traceback
    assert re.search(message, said), said


def test_there_are_enough():
    assert len(ALL) >= 200
