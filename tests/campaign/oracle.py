"""Workers in float64 NumPy, from the recurrences of the documentation alone.

``slamb_jax.adamw``, ``lion`` and ``sgd``, behind them ``average_parameters_every``.
Codes are those of a quantizer that loses nothing, or of 16 bits; masks are given.
"""

from typing import Any

import numpy as np

Tree = list[np.ndarray]


class Workers:
    """n workers; ``settings`` are those of the optimizer and of its exchange."""

    def __init__(self, params: Tree, n: int, settings: dict[str, Any]) -> None:
        def zeros() -> Tree:
            return [np.zeros(x.shape) for x in params]

        self.n, self.t, self.given = n, 0, settings
        self.p = [[x.astype(np.float64) for x in params] for _ in range(n)]
        self.m, self.v = ([zeros() for _ in range(n)] for _ in range(2))
        self.age = [np.zeros(x.shape, int) for x in params]
        self.anchor = [x.astype(np.float64) for x in params]
        self.average_nu, self.trace = zeros(), zeros()
        self.undecided = [False] * len(params)  # leaves with a sign that rounding takes

    def step(self, grads: list[Tree], masks: Tree, due: Tree, rate: float) -> None:
        """``masks``: of the momentum; ``due``: of the parameters, if they have turns"""
        self.t += 1
        before = [[x.copy() for x in p] for p in self.p]
        for j, mask in enumerate(masks):
            g = [grads[i][j].astype(np.float64) for i in range(self.n)]
            if self.given["mean_first"]:
                self.mean_first(j, g, before, rate)
                continue
            self.momentum(j, g, mask)
            self.age[j] = np.where(mask, 0, self.age[j] + 1)
            r = self.given["b3"] ** self.age[j]
            factor = r + (1 - r) / np.sqrt(self.n)
            for i in range(self.n):
                u = factor * getattr(self, self.given["optimizer"])(i, j, g[i])
                decay = self.given["weight_decay"] * self.given["decays"][j]
                self.p[i][j] = self.p[i][j] - rate * (u + decay * before[i][j])
        if not self.given["mean_first"] and (self.n > 1 or self.given["outer"]):
            for j in range(len(masks)):
                if (mask := self.turn(j, due)) is not None:
                    self.average(j, mask, [p[j] for p in before])

    def mean_first(self, j: int, g: Tree, before: list[Tree], rate: float) -> None:
        """The direction of the workers' mean momentum, alike on all."""
        given, b1, t = self.given, self.given["b1"], self.t
        old = [m[j] for m in self.m]
        new = [b1 * m + (1 - b1) * x for m, x in zip(old, g, strict=True)]
        for i in range(self.n):
            self.m[i][j] = new[i]
        corrected = given["optimizer"] == "adamw"
        seen = t - 1 if given["overlap"] else t
        fix = (1 - b1**seen or 1.0) if corrected else 1.0
        if given["overlap"]:
            sent = old
        elif given["optimizer"] == "lion":
            c = given["share"]
            sent = [c * m + (1 - c) * x for m, x in zip(old, g, strict=True)]
        elif given["nesterov"]:
            ahead = 1 - b1 ** (t + 1) if corrected else 1.0
            pairs = zip(new, g, strict=True)
            sent = [b1 * m * fix / ahead + (1 - b1) * x for m, x in pairs]
        else:
            sent = new
        mean = np.mean(sent, axis=0) / fix
        if given["optimizer"] == "adamw":
            b2 = given["b2"]
            v = self.v[0][j] = b2 * self.v[0][j] + (1 - b2) * mean**2
            root = np.sqrt(v / (1 - b2**seen or 1.0) + given["eps_root"])
            u = mean / (root + given["eps"])
        elif given["optimizer"] == "lion":
            self.undecided[j] |= bool((np.abs(mean) < 1e-5).any())
            u = np.sign(mean)
        else:
            u = mean / (1 - b1)
        decay = given["weight_decay"] * given["decays"][j]
        for i in range(self.n):
            self.p[i][j] = self.p[i][j] - rate * (u + decay * before[i][j])

    def momentum(self, j: int, g: Tree, mask: np.ndarray) -> None:
        b = self.given["b1"]
        if self.given["overlap"]:
            self.exchange(j, mask)
        for i in range(self.n):
            self.m[i][j] = b * self.m[i][j] + (1 - b) * g[i]
        if not self.given["overlap"]:
            self.exchange(j, mask)

    def exchange(self, j: int, mask: np.ndarray) -> None:
        if not self.given["exchanges"]:
            return
        mean = np.mean([m[j] for m in self.m], axis=0)
        for m in self.m:
            m[j] = np.where(mask, mean, m[j])

    def adamw(self, i: int, j: int, g: np.ndarray) -> np.ndarray:
        b1, b2, t = self.given["b1"], self.given["b2"], self.t
        m = self.m[i][j] / (1 - b1**t)
        if self.given["nesterov"]:
            m = b1 * self.m[i][j] / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
        of = m if self.given["nu_of"] == "momentum" else g
        self.v[i][j] = b2 * self.v[i][j] + (1 - b2) * of**2
        root = np.sqrt(self.v[i][j] / (1 - b2**t) + self.given["eps_root"])
        return m / (root + self.given["eps"])

    def lion(self, i: int, j: int, g: np.ndarray) -> np.ndarray:
        b1, b2 = self.given["share"], self.given["b1"]
        both = b1 * self.m[i][j] + (b2 - b1) * g
        self.undecided[j] |= bool((np.abs(both) < 1e-5).any())
        return np.sign(both)

    def sgd(self, i: int, j: int, g: np.ndarray) -> np.ndarray:
        mu, m = self.given["b1"], self.m[i][j]
        if self.given["nesterov"]:
            m = mu * m + (1 - mu) * g
        return m / (1 - mu)

    def turn(self, j: int, due: Tree) -> np.ndarray | None:
        """Which coordinates are averaged at this step; None: nothing is."""
        every, outer = self.given["sync_every"], self.given["outer"]
        if self.given["rolling"] and every > 1:
            return due[j]
        first = 0 if outer else 1
        whole = np.ones(self.p[0][j].shape, bool)
        return whole if self.t % every == first % every else None

    def average(self, j: int, mask: np.ndarray, before: Tree) -> None:
        after = [p[j] for p in self.p]
        late = self.given["overlap"]
        from_here = before if late else after
        update = [a - b if late else 0.0 for a, b in zip(after, before, strict=True)]
        there = self.averaged(j, mask, from_here)
        for i in range(self.n):
            self.p[i][j] = np.where(mask, there[i], from_here[i]) + update[i]

    def averaged(self, j: int, mask: np.ndarray, xs: Tree) -> Tree:
        """Where the average takes the workers' ``xs``, which begin at the anchor."""
        if self.given["average_payload"] is None and not self.given["outer"]:
            return [np.mean(xs, axis=0)] * self.n
        a = self.anchor[j]
        differences = [x - a for x in xs]
        sent = differences if self.n == 1 else [self.coded(d) for d in differences]
        mean = np.mean(sent, axis=0)
        if (b := self.given["average_b2"]) is not None and not self.given["outer"]:
            v = b * self.average_nu[j] + (1 - b) * mean**2
            self.average_nu[j] = np.where(mask, v, self.average_nu[j])
            whole = np.mean(v[mask]) if mask.any() else 0.0
            if whole > 0:
                mean = mean * 1.1 / (np.sqrt(v / whole) + 0.1)
        if self.given["outer"]:
            rate, mu = self.given["outer"]
            self.trace[j] = mu * self.trace[j] - mean
            mean = -rate * (mu * self.trace[j] - mean)  # Nesterov's
        self.anchor[j] = np.where(mask, a + mean, a)
        return [self.anchor[j]] * self.n  # what rounding took is lost

    def coded(self, d: np.ndarray) -> np.ndarray:
        if self.given["average_payload"] != "bfloat16":
            return d
        words = np.asarray(d, np.float32).view(np.uint32).astype(np.uint64)
        half = (words + 0x7FFF + ((words >> np.uint64(16)) & np.uint64(1))) >> 16
        return (half << 16).astype(np.uint32).view(np.float32).astype(np.float64)
