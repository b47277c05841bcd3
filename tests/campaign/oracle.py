"""Workers in float64 NumPy, from the recurrences of the documentation alone.

``slamb_jax.adamw``, ``lion``, ``sgd``, ``slamb`` and ``mask_momentum`` by itself,
where workers agree on the mean momentum, and where they average parameters. Codes are
those of bfloat16, or keep a share of each number: so rounding makes no choices, and
what it takes has an effect that can be computed.
"""

import numpy as np


def norm(x):
    """Of each worker's, with the dimensions of ``x``."""
    return np.sqrt(np.sum(x**2, tuple(range(1, x.ndim)), keepdims=True))


class Workers:
    """n workers; ``given`` are the settings of the optimizer and of its exchange.

    Every array has a leading axis of workers. ``held`` is the share of the momentum
    that is sent, times the momentum.
    """

    def __init__(self, params, n, given):
        self.n, self.t, self.given = n, 0, given
        self.p = [np.stack([x.astype(np.float64)] * n) for x in params]
        self.held, self.v = ([np.zeros(x.shape) for x in self.p] for _ in range(2))
        self.anchor = [x[0] for x in self.p]
        self.trace = [np.zeros(x.shape) for x in self.anchor]
        self.undecided = [False] * len(params)  # leaves with a sign that rounding takes
        self.agree = given["sync_every"] == 1 and given["outer"] is None

    def step(self, grads, rate):
        self.t += 1
        for j, g in enumerate(grads):
            before = self.p[j]
            u = self.direction(j, self.momentum(j, g.astype(np.float64)))
            decay = self.given["weight_decay"] * self.given["decays"][j] * before
            u = self.scaled(before, u, decay) if self.is_("lamb") else u + decay
            self.p[j] = before - rate * u
            if not self.agree:
                self.average(j, before)

    def is_(self, *names):
        return self.given["optimizer"] in names

    def momentum(self, j, g):
        """The corrected momentum that each worker steps along; v of it; the memory."""
        b, held = self.given["b1"], self.held[j]
        late = self.given["overlap"] and self.agree
        corrects = self.is_("adamw", "lamb", "momentum")

        def fix(t):
            return 1 - b**t if corrects and t else 1.0

        if late:
            of_m, of_now, sent = 1.0, fix(self.t - 1), held
        elif self.given["nesterov"]:
            of_m, of_now = b * b, fix(self.t + 1)
            sent = held + (b * (1 - b) + (1 - b) * of_now / fix(self.t)) * g
        else:
            of_m, of_now = (self.given["share"] if self.is_("lion") else b), fix(self.t)
            sent = held + (1 - of_m) * g
        sent = sent / of_now
        mean, waits = self.agreed(j, sent) if self.agree else (sent, 0.0)
        self.held[j] = b * held + (1 - b) * (of_m * g + of_now * waits)
        self.v[j] = self.b2 * self.v[j] + (1 - self.b2) * mean**2
        return mean

    @property
    def b2(self):
        """Of v, which is the unit of the codes and of some no more than that."""
        return self.given["b2"] if self.is_("adamw", "lamb") else 0.98

    def agreed(self, j, sent):
        """The mean in codes, and what rounding took that waits."""
        if self.n == 1:
            return sent, 0.0
        v = self.v[j] / (1 - self.b2 ** (self.t - 1) or 1.0)
        root, whole = np.sqrt(v), norm(v**0.5) / max(1, v[0].size) ** 0.5
        unit = np.where(whole > 0, root + 0.05 * whole, 1.0)
        if self.is_("momentum"):  # keeps no v: all of it waits, of means too
            unit, root = np.ones(v.shape), np.zeros(v.shape)
        coded = unit * self.coded(sent / unit)
        mean = unit * self.coded(coded.mean(0, keepdims=True) / unit)
        lost = coded.mean(0) - mean if self.is_("momentum") else 0.0
        return mean, (1 - 0.5 * root / unit) * (sent - coded + lost)

    def direction(self, j, m):
        given, late = self.given, self.given["overlap"] and self.agree
        if self.is_("adamw", "lamb"):
            v = self.v[j] / (1 - self.b2 ** (self.t - late) or 1.0)
            root = given["eps_root"] if self.is_("adamw") else 0.0
            return m / (np.sqrt(v + root) + given["eps"])
        if self.is_("lion"):
            self.undecided[j] |= bool((np.abs(m) < 1e-5).any())
            return np.sign(m)
        return m / (1 - given["b1"]) if self.is_("sgd") else m

    def scaled(self, p, u, decay):
        """By LAMB's trust ratios."""
        decayed, product = u + decay, self.given["form"] == "product"
        above, below = norm(p), norm(decayed if product else u)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where((above > 0) & (below > 0), above / below, 1.0)
        if not product or p.ndim > 2:
            ratio = np.clip(ratio, self.given["c_min"], self.given["c_max"])
        return ratio * decayed

    def average(self, j, before):
        """Of the parameters, or of their differences to the last average."""
        outer, every = self.given["outer"], self.given["sync_every"]
        if self.t % every != (0 if outer else 1) % every:
            return
        late = self.given["overlap"]
        here = before if late else self.p[j]
        if outer is None:
            there = here.mean(0)
        else:
            d = here - self.anchor[j]
            mean = self.coded(self.coded(d).mean(0)) if self.n > 1 else d[0]
            rate, mu = outer
            self.trace[j] = mu * self.trace[j] - mean
            there = self.anchor[j] - rate * (mu * self.trace[j] - mean)  # Nesterov's
            self.anchor[j] = there
        self.p[j] = there + (self.p[j] - here if late else np.zeros(here.shape))

    def coded(self, x):
        if self.given["codes"] != "bfloat16":
            return x * (1.0 if self.given["codes"] is None else self.given["codes"])
        words = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
        half = (words + 0x7FFF + ((words >> np.uint64(16)) & np.uint64(1))) >> 16
        return (half << 16).astype(np.uint32).view(np.float32).astype(np.float64)
