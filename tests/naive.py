"""SLAMB in float64 NumPy, written from its description, one coordinate at a time."""

from typing import Any

import numpy as np


def norm(x: np.ndarray) -> float:
    return float(np.sqrt(np.sum(np.square(x))))


def ratio(p: np.ndarray, u: np.ndarray, otherwise: float) -> float:
    above, below = norm(p), norm(u)
    return above / below if above > 0 and below > 0 else otherwise


class NaiveSlamb:
    """n workers, each a list of leaves; masks are given, ages follow a recurrence."""

    overlap = False  # exchange m before the gradient is added, p before its update

    def __init__(self, params: list[np.ndarray], n: int, **settings: Any):
        self.p = [[x.astype(np.float64) for x in params] for _ in range(n)]
        self.m = [[np.zeros(x.shape) for x in params] for _ in range(n)]
        self.v = [[np.zeros(x.shape) for x in params] for _ in range(n)]
        self.age = [np.zeros(x.shape, int) for x in params]
        self.t = 0
        self.n = n
        for name, value in settings.items():
            setattr(self, name, value)

    def step(self, grads: list[list[np.ndarray]], masks: list[np.ndarray]) -> None:
        self.t += 1
        before = [[x.copy() for x in p] for p in self.p]
        for j, mask in enumerate(masks):
            if self.overlap:
                self.exchange(j, mask)
            for i in range(self.n):
                g = grads[i][j].astype(np.float64)
                self.m[i][j] = self.b1 * self.m[i][j] + (1 - self.b1) * g
            if not self.overlap:
                self.exchange(j, mask)
            for i in range(self.n):
                g = grads[i][j].astype(np.float64)
                self.v[i][j] = self.b2 * self.v[i][j] + (1 - self.b2) * g**2
            self.age[j] = np.where(mask, 0, self.age[j] + 1)
            r = self.b3 ** self.age[j]
            for i in range(self.n):
                update = getattr(self, self.form)
                update(self.p[i], self.m[i][j], self.v[i][j], j, mask, r)
        if self.sync_every and (self.t % self.sync_every) == (1 % self.sync_every):
            for j in range(len(masks)):
                averaged = before if self.overlap else self.p
                mean = np.mean([averaged[i][j] for i in range(self.n)], axis=0)
                for i in range(self.n):
                    late = self.p[i][j] - before[i][j] if self.overlap else 0.0
                    self.p[i][j] = mean + late

    def exchange(self, j: int, mask: np.ndarray) -> None:
        mean = np.mean([self.m[i][j] for i in range(self.n)], axis=0)
        for i in range(self.n):
            self.m[i][j] = np.where(mask, mean, self.m[i][j])

    def product(self, params, m, v, j, mask, r):
        p, decay = params[j], self.weight_decay * self.decays[j]
        if self.bias_correction:
            m, v = m / (1 - self.b1**self.t), v / (1 - self.b2**self.t)
        u = m / (np.sqrt(v) + self.eps) + decay * p
        if p.ndim <= 1:
            params[j] = p - self.lr * ratio(p, u, 1.0) * u
            return
        high, low = ratio(p[mask], u[mask], 1.0), ratio(p[~mask], u[~mask], 1.0)
        phi = np.clip(r * high + (1 - r) * low, self.c_min, self.c_max)
        eta = r * self.lr + (1 - r) * self.lr / np.sqrt(self.n)
        params[j] = p - phi * eta * u

    def sum(self, params, m, v, j, mask, r):
        p, decay = params[j], self.weight_decay * self.decays[j]
        correction = np.sqrt(1 - self.b2**self.t) / (1 - self.b1**self.t)
        u0 = m / (np.sqrt(v) + self.eps) * correction
        high = np.clip(ratio(p[mask], u0[mask], 1.0), self.c_min, self.c_max)
        low = np.clip(ratio(p[~mask], u0[~mask], 0.0), 0.0, self.c_max)
        u = u0 + decay * p
        small = self.lr / np.sqrt(self.n)
        params[j] = p - self.lr * high * r * u - small * low * (1 - r) * u
