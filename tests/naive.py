"""Workers and their codes in float64 NumPy, from the documentation alone.

The workers have ``slamb_jax.adamw``, ``lion``, ``sgd``, ``lamb``, ``slamb``, or
``mask_momentum`` by itself, and agree on the mean momentum, or average parameters.
Their codes are those of bfloat16, or keep a share of each number: so rounding makes no
choices, and what it takes has an effect that can be computed.
"""

import numpy as np


def norm(x):
    """Of each worker's, with the dimensions of ``x``."""
    return np.sqrt(np.sum(x**2, tuple(range(1, x.ndim)), keepdims=True))


def ratio(p, u, otherwise):
    above, below = norm(p), norm(u)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((above > 0) & (below > 0), above / below, otherwise)


PLAIN = {  # settings of the mean alone
    "b1": 0.9, "b2": 0.95, "share": 0.0, "eps": 1e-4, "eps_root": 0.0,
    "nesterov": False, "form": "sum", "c_min": 0.01, "c_max": 1e3, "weight_decay": 0.0,
    "codes": 0.5, "sync_every": 1, "outer": None, "rate": "constant", "b3": 0.7,
    "zero": False,
}  # fmt: skip


class Workers:
    """n workers; ``given`` are the settings of the optimizer and of its exchange.

    Every array has a leading axis of workers. ``held`` is the share of the momentum
    that is sent, times the momentum. SLAMB's masks are given, its ages are counted.
    """

    def __init__(self, params, n, given):
        self.n, self.t, self.given = n, 0, given
        self.p = [np.stack([x.astype(np.float64)] * n) for x in params]
        self.held, self.v = ([np.zeros(x.shape) for x in self.p] for _ in range(2))
        self.anchor = [x[0] for x in self.p]
        self.trace = [np.zeros(x.shape) for x in self.anchor]
        self.undecided = [False] * len(params)  # leaves with a sign that rounding takes
        self.age = [np.zeros(x.shape, int) for x in params]
        means = given["sync_every"] == 1 and given["outer"] is None
        self.agree = means and not self.is_("slamb")

    def step(self, grads, rate, masks=None):
        self.t += 1
        for j, g in enumerate(grads):
            p, mask = self.p[j], masks and masks[j]
            g = g.astype(np.float64)
            m = self.selected(j, g, mask) if masks else self.momentum(j, g)
            u = self.direction(j, m)
            decay = self.given["weight_decay"] * self.given["decays"][j] * p
            scales = self.is_("lamb", "slamb")
            u = self.scaled(j, u, decay, mask) if scales else u + decay
            self.p[j] = p - rate * u
            if not self.agree and self.given["sync_every"]:
                self.average(j)

    def is_(self, *names):
        return self.given["optimizer"] in names

    def momentum(self, j, g):
        """The corrected momentum that each worker steps along; v of it; the memory."""
        b, held = self.given["b1"], self.held[j]
        corrects = self.is_("adamw", "lamb", "momentum")

        def fix(t):
            return 1 - b**t if corrects else 1.0

        if self.given["nesterov"]:
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

    def selected(self, j, g, mask):
        """The same of SLAMB, which exchanges a part of the workers' own momenta."""
        b = self.given["b1"]
        held = b * self.held[j] + (1 - b) * g
        self.held[j] = np.where(mask, held.mean(0), held)
        self.v[j] = self.b2 * self.v[j] + (1 - self.b2) * g**2
        self.age[j] = np.where(mask, 0, self.age[j] + 1)
        return self.held[j] / (1 - b**self.t)

    @property
    def b2(self):
        """Of v, which is the unit of the codes and of some no more than that."""
        return self.given["b2"] if self.is_("adamw", "lamb", "slamb") else 0.98

    @property
    def encodes_means(self):
        """Two workers send each other their codes, and find the mean themselves."""
        return self.n > 2 or not isinstance(self.given["codes"], float)

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
        mean = coded.mean(0, keepdims=True)
        if self.encodes_means:
            mean = unit * self.coded(mean / unit)
        lost = coded.mean(0) - mean if self.is_("momentum") else 0.0
        return mean, (1 - 0.5 * root / unit) * (sent - coded + lost)

    def direction(self, j, m):
        given = self.given
        if self.is_("slamb"):
            fix = 1 - self.b2**self.t
            eps = given["eps"] / (fix**0.5 if given["form"] == "sum" else 1.0)
            return m / (np.sqrt(self.v[j] / fix) + eps)
        if self.is_("adamw", "lamb"):
            v = self.v[j] / (1 - self.b2**self.t)
            root = given["eps_root"] if self.is_("adamw") else 0.0
            return m / (np.sqrt(v + root) + given["eps"])
        if self.is_("lion"):
            self.undecided[j] |= bool((np.abs(m) < 1e-5).any())
            return np.sign(m)
        return m / (1 - given["b1"]) if self.is_("sgd") else m

    def scaled(self, j, u, decay, mask):
        """By LAMB's trust ratios, or by those of what was sent and of the rest."""
        p, product = self.p[j], self.given["form"] == "product"
        mask = np.ones(p.shape[1:], bool) if mask is None else mask
        r = self.given.get("b3", 1.0) ** self.age[j]
        of, low, high = u, self.given["c_min"], self.given["c_max"]
        if product:
            of = u + decay
            low, high = (low, high) if p.ndim > 2 else (0.0, np.inf)
        sent = ratio(p * mask, of * mask, 1.0)
        rest = ratio(p * ~mask, of * ~mask, 1.0 if product else 0.0)
        own = (1 - r) / np.sqrt(self.n)  # of a step that nobody else takes
        if product:
            return np.clip(r * sent + (1 - r) * rest, low, high) * (r + own) * of
        factor = np.clip(sent, low, high) * r + np.clip(rest, 0.0, high) * own
        return factor * (u + decay)

    def average(self, j):
        """Of the parameters, or of their differences to the last average."""
        outer, every = self.given["outer"], self.given["sync_every"]
        if self.t % every != (0 if outer else 1) % every:
            return
        here = self.p[j]
        if outer is None:
            there = here.mean(0)
        else:
            d = here - self.anchor[j]
            mean = self.coded(d).mean(0) if self.n > 1 else d[0]
            if self.n > 1 and self.encodes_means:
                mean = self.coded(mean)
            rate, mu = outer
            self.trace[j] = mu * self.trace[j] - mean
            there = self.anchor[j] - rate * (mu * self.trace[j] - mean)  # Nesterov's
            self.anchor[j] = there
        self.p[j] = np.broadcast_to(there, here.shape)

    def coded(self, x):
        if self.given["codes"] == "bfloat16":
            return x.astype(np.float32).astype("bfloat16").astype(np.float64)
        return x * (1.0 if self.given["codes"] is None else self.given["codes"])


def largest_of(count, blocks):
    """Of each ``count`` planes the largest, if it is at least the mean of the block.

    Of equal ones it is the first that is positive, or if none is, the first. Blocks are
    of shape (number, planes, width). A count of 1 is the ternary code.
    """
    number, planes, width = blocks.shape
    size = np.abs(blocks)
    each = size * (1 + 2.0**-30 * (blocks > 0))
    each = each.reshape(number, planes // count, count, width)
    largest = np.eye(count, dtype=bool)[each.argmax(2)].swapaxes(2, 3)
    # A little less than the mean: of equal magnitudes all are large.
    least = (1 - 2.0**-16) * size.mean((1, 2), keepdims=True)
    sent = largest.reshape(blocks.shape) & (size >= least) & (size > 0)
    total, number = ((x * sent).sum((1, 2), keepdims=True) for x in (size, sent))
    return np.sign(blocks) * sent * (total / np.maximum(number, 1))


COUNTS = {"ternary": 1} | {f"largest_of_{x}": x for x in (2, 3, 7, 8, 31, 127)}
DRAWN = ("uniform8", "uniform4")


def in_blocks(x, group):
    """A flat array, padded, as (blocks, planes, width): row r of a group's planes."""
    x = np.pad(x, (0, -x.size % group.size)).reshape(-1, *group[1:])
    return x.swapaxes(1, 2).reshape(-1, group.planes, group.width)


def flat(blocks, group, size):
    """Undoes :func:`in_blocks`."""
    x = blocks.reshape(-1, group.rows, group.planes, group.width).swapaxes(1, 2)
    return x.reshape(-1)[:size]


def coded(payload, x, group):
    """A flat array after it was sent by a payload that draws nothing."""
    blocks = in_blocks(np.asarray(x, np.float64), group)
    if payload == "sign":
        number = np.maximum((blocks != 0).sum((1, 2), keepdims=True), 1)
        scale = np.abs(blocks).sum((1, 2), keepdims=True) / number
        return flat(np.where(blocks >= 0, scale, -scale), group, x.size)
    return flat(largest_of(COUNTS[payload], blocks), group, x.size)


def grid(payload, x, group):
    """The step of each element's grid, between the two values that it may become."""
    blocks = in_blocks(np.asarray(x, np.float64), group)
    step = np.abs(blocks).max((1, 2), keepdims=True)
    step = step / {"uniform8": 127, "uniform4": 7, "TernGrad": 1}[payload]
    return flat(np.broadcast_to(step, blocks.shape), group, x.size)
