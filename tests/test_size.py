"""The library stays as small as one person can hold.

A change that needs more room says so in ``tests/size.json``, in the commit that makes
it; one that needs less takes the room away there.
"""

import json

from tests.size import LIMITS, lines_by_folder, longest_functions, walks

ALLOWED = json.loads(LIMITS.read_text())


def test_the_library_has_no_more_lines_than_it_may_have():
    code, comments = lines_by_folder()
    assert code.total() <= ALLOWED["lines of code"]
    for folder in ("links", "exchange"):
        assert 100 * comments[folder] >= ALLOWED["comments to 100"] * code[folder]
    name, length = longest_functions()[0]
    assert length <= ALLOWED["longest function"], name


def test_an_update_goes_through_no_more_than_it_may():
    for name, found in walks().items():
        for what in ("files", "functions"):
            assert found[what] <= ALLOWED[name][what], (name, what)
