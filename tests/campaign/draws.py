"""How much is drawn: little by default, more in CI, and as much as is asked for.

``CAMPAIGN=20`` draws twenty times what CI draws, and looks for the least example that
fails, which takes minutes; ``CAMPAIGN_SEED=7`` draws others.
"""

import os
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import strategies as st

SHAPES = st.lists(  # of the leaves of a tree
    st.sampled_from(
        [(), (0,), (1,), (7,), (1, 1), (3, 5), (16, 8), (0, 4), (2, 3, 5), (11, 13)]
    ),
    min_size=1,
    max_size=4,
)
SEED = int(os.environ.get("CAMPAIGN_SEED", "0"))
TIMES = int(os.environ.get("CAMPAIGN", "0"))
IN_CI = os.environ.get("HYPOTHESIS_PROFILE", "default") != "default"


def chosen(few: int, many: int) -> hypothesis.settings:
    """Hypothesis' settings: ``few`` examples, ``many`` under the profile of CI."""
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    if TIMES:
        phases += [hypothesis.Phase.target, hypothesis.Phase.shrink]
    examples = many * max(1, TIMES) if TIMES or IN_CI else few
    return hypothesis.settings(max_examples=examples, phases=phases)


def drawn(few: int, many: int) -> Callable[[Any], Any]:
    """A decorator: so many examples, of the campaign's seed."""
    return lambda test: hypothesis.seed(SEED)(chosen(few, many)(test))
