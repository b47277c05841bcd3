"""What is drawn, and how much: little by default, more in CI, as much as is asked for.

``CAMPAIGN=20`` draws twenty times what CI draws, and looks for the least example that
fails, which takes minutes; ``CAMPAIGN_SEED=7`` draws others.
"""

import itertools
import os
import random

import hypothesis

SEED = int(os.environ.get("CAMPAIGN_SEED", "0"))
TIMES = int(os.environ.get("CAMPAIGN", "0"))
IN_CI = os.environ.get("HYPOTHESIS_PROFILE", "default") != "default"


def chosen(few, many):
    """Hypothesis' settings: ``few`` examples, ``many`` under the profile of CI."""
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    if TIMES:
        phases += [hypothesis.Phase.target, hypothesis.Phase.shrink]
    examples = many * max(1, TIMES) if TIMES or IN_CI else few
    return hypothesis.settings(max_examples=examples, phases=phases)


def drawn(few, many):
    """A decorator: so many examples, of the campaign's seed."""
    return lambda test: hypothesis.seed(SEED)(chosen(few, many)(test))


_TRIES = 1000  # random rows with a pair in them, before it counts as impossible


def _pairs(row):
    return set(itertools.combinations(sorted(row.items()), 2))


def pairwise(factors, settled, seed):
    """A covering array of strength two, and the pairs that no row can have.

    Greedy: the best of 30 random rows each. ``settled`` takes a random row and the
    names that are fixed in it, and returns the row to try, or None if there is none.
    """
    rng = random.Random(seed)
    settings = [[(name, x) for x in factors[name]] for name in sorted(factors)]
    missing, rows, impossible = set(), [], []
    for two in itertools.combinations(settings, 2):
        missing.update(itertools.product(*two))
    while missing:
        due = min(missing, key=repr)
        fixed = dict(due)
        draws = (dict(map(rng.choice, settings)) | fixed for _ in range(_TRIES))
        kept = (settled(row, set(fixed)) for row in draws)
        possible = list(itertools.islice(filter(None, kept), 30))
        if possible:
            rows.append(max(possible, key=lambda row: len(_pairs(row) & missing)))
            missing -= _pairs(rows[-1])
        else:
            impossible.append(due)
            missing.remove(due)
    return rows, impossible


def name_of(row, default):
    """The settings that are not the default, as the name of a test."""
    said = [f"{k}={v}" for k, v in row.items() if v != default[k]]
    return ",".join(said) or "default"
