"""SLAMB in float64 NumPy, written from its description, one worker at a time."""

import numpy as np


def norm(x):
    return float(np.sqrt(np.sum(np.square(x))))


def ratio(p, u, otherwise):
    above, below = norm(p), norm(u)
    return above / below if above > 0 and below > 0 else otherwise


class NaiveSlamb:
    """n workers, the first axis of every leaf; masks are given, ages are counted."""

    overlap = False  # exchange m before the gradient is added, p before its update

    def __init__(self, params, n, **settings):
        self.p = [np.stack([x.astype(np.float64)] * n) for x in params]
        self.m, self.v = ([np.zeros(x.shape) for x in self.p] for _ in range(2))
        self.age = [np.zeros(x.shape, int) for x in params]
        self.n, self.t = n, 0
        for name, value in settings.items():
            setattr(self, name, value)

    def step(self, grads, masks):
        self.t += 1
        due = self.sync_every and self.t % self.sync_every == 1 % self.sync_every
        for j, (g, mask) in enumerate(zip(grads, masks, strict=True)):
            g, before = g.astype(np.float64), self.p[j]
            if self.overlap:
                self.exchange(j, mask)
            self.m[j] = self.b1 * self.m[j] + (1 - self.b1) * g
            if not self.overlap:
                self.exchange(j, mask)
            self.v[j] = self.b2 * self.v[j] + (1 - self.b2) * g**2
            self.age[j] = np.where(mask, 0, self.age[j] + 1)
            rest = self.weight_decay * self.decays[j], mask, self.b3 ** self.age[j]
            workers = zip(before, self.m[j], self.v[j], strict=True)
            u = np.stack([getattr(self, self.form)(*own, *rest) for own in workers])
            self.p[j] = before - self.lr * u
            if due:
                averaged = before if self.overlap else self.p[j]
                self.p[j] = self.p[j] + averaged.mean(0) - averaged

    def exchange(self, j, mask):
        self.m[j] = np.where(mask, self.m[j].mean(0), self.m[j])

    def product(self, p, m, v, decay, mask, r):
        if self.bias_correction:
            m, v = m / (1 - self.b1**self.t), v / (1 - self.b2**self.t)
        u = m / (np.sqrt(v) + self.eps) + decay * p
        if p.ndim <= 1:
            return ratio(p, u, 1.0) * u
        high, low = ratio(p[mask], u[mask], 1.0), ratio(p[~mask], u[~mask], 1.0)
        phi = np.clip(r * high + (1 - r) * low, self.c_min, self.c_max)
        return phi * (r + (1 - r) / np.sqrt(self.n)) * u

    def sum(self, p, m, v, decay, mask, r):
        correction = np.sqrt(1 - self.b2**self.t) / (1 - self.b1**self.t)
        u0 = m / (np.sqrt(v) + self.eps) * correction
        high = np.clip(ratio(p[mask], u0[mask], 1.0), self.c_min, self.c_max)
        low = np.clip(ratio(p[~mask], u0[~mask], 0.0), 0.0, self.c_max)
        return (high * r + low * (1 - r) / np.sqrt(self.n)) * (u0 + decay * p)
