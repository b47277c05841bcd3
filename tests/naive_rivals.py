"""The rivals in plain NumPy, worker by worker and equation by equation.

Each function takes the parameters, gradients as ``grads[t][i]`` of worker i, and gives
the parameters of every worker in the end. Float64 throughout.
"""

import numpy as np
import optax
from scipy import fft


def wide(tree):
    return {name: np.asarray(x, np.float64) for name, x in tree.items()}


def mean(trees):
    return {name: np.mean([t[name] for t in trees], 0) for name in trees[0]}


def flat(tree):
    return np.concatenate([tree[name].ravel() for name in sorted(tree)])


def unflat(vector, like):
    out, start = {}, 0
    for name in sorted(like):
        out[name] = vector[start : start + like[name].size].reshape(like[name].shape)
        start += like[name].size
    return out


def dense(params, grads, *, optimizer, dtype=np.float32):
    """An optimizer of optax on mean gradients, as float32, of what is rounded first."""
    p, state = params, optimizer.init(params)
    for gs in grads:
        rounded = [{k: np.float32(x.astype(dtype)) for k, x in g.items()} for g in gs]
        updates, state = optimizer.update(mean(rounded), state, p)
        p = optax.apply_updates(p, updates)
    return [p] * len(grads[0])


def powersgd_sgd(params, grads, *, rate, first_q, matrix):
    """``first_q``: the first Q of each factored leaf; ``matrix``: their shapes."""
    p, n = wide(params), len(grads[0])
    errors = [{name: np.zeros_like(x) for name, x in p.items()} for _ in range(n)]
    q = wide(first_q)
    for gs in grads:
        for name in p:
            xs = [gs[i][name] + errors[i][name] for i in range(n)]
            u = np.mean(xs, 0)
            if name in q:
                ms = [x.reshape(matrix[name]) for x in xs]
                product = np.mean([m @ q[name] for m in ms], 0)
                basis = np.linalg.svd(product, full_matrices=False)[0]
                q[name] = np.mean([m.T @ basis for m in ms], 0)
                u = (basis @ q[name].T).reshape(u.shape)
            for i in range(n):
                errors[i][name] = xs[i] - u
            p[name] = p[name] - rate * u
    return [p] * n


class Adam:
    def __init__(self, rate):
        self.rate, self.t, self.m, self.v = rate, 0, 0.0, 0.0

    def __call__(self, g):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.999 * self.v + 0.001 * g**2
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        return -self.rate * m / (np.sqrt(v) + 1e-8)


def orthogonal(x):
    """Five steps of the quintic, in float64."""
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T).T
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def dion2(params, grads, *, rate, momentum, matrix, rows):
    p, n = wide(params), len(grads[0])
    ms = [{k: np.zeros(shape) for k, shape in matrix.items()} for _ in range(n)]
    adams = {k: Adam(rate / 3) for k in p if k not in matrix}
    for t, gs in enumerate(grads):
        for k, adam in adams.items():
            p[k] = p[k] + adam(np.mean([wide(g)[k] for g in gs], 0))
        for (k, shape), chosen in zip(matrix.items(), rows[t], strict=True):
            for m, g in zip(ms, map(wide, gs), strict=True):
                m[k] = m[k] + g[k].reshape(shape)
            u = np.zeros(shape)
            u[chosen] = orthogonal(np.mean([m[k][chosen] for m in ms], 0))
            scale = max(1, shape[1] / shape[0]) ** 0.5
            p[k] = p[k] - rate * scale * u.reshape(p[k].shape)
            for m in ms:
                m[k][chosen] *= momentum
    return [p] * n


def two_bits(x, chosen):
    """What SparseLoCo sends of x: a vector that is 0 elsewhere."""
    out = np.zeros_like(x)
    for start in range(0, x.size, 4096):
        chunk = np.pad(x[start : start + 4096], (0, max(0, start + 4096 - x.size)))
        places = np.argsort(-abs(chunk), kind="stable")[:chosen]
        sizes = abs(chunk[places])
        high = sizes > (sizes[0] + sizes[-1]) / 2
        for place, big in zip(places, high, strict=True):
            magnitude = sizes[high].mean() if big else sizes[~high].mean()
            if start + place < x.size:
                out[start + place] = -magnitude if chunk[place] < 0 else magnitude
    return out


def sparseloco(params, grads, *, rate, every, chosen, decay, outer_rate):
    start, n = wide(params), len(grads[0])
    anchor = flat(start)
    workers, adams = [anchor] * n, [Adam(rate) for _ in range(n)]
    errors = [np.zeros_like(anchor)] * n
    for t, gs in enumerate(grads, 1):
        workers = [w + a(flat(g)) for w, a, g in zip(workers, adams, gs, strict=True)]
        if t % every == 0:
            xs = [decay * e + anchor - w for e, w in zip(errors, workers, strict=True)]
            sent = [two_bits(x, chosen) for x in xs]
            errors = [x - s for x, s in zip(xs, sent, strict=True)]
            anchor = anchor - outer_rate * np.mean(sent, 0)
            workers = [anchor] * n
    return [unflat(w, start) for w in workers]


def demo(params, grads, *, rate, chosen, matrix):
    p, n = wide(params), len(grads[0])
    deltas = [{name: np.zeros_like(x) for name, x in p.items()} for _ in range(n)]

    def side(size):
        return max(s for s in range(1, 65) if size % s == 0)

    for gs in grads:
        for name in p:
            rows, columns = matrix[name]
            a, b = side(rows), side(columns)
            update = np.zeros((rows, columns))
            for top in range(0, rows, a):
                for left in range(0, columns, b):
                    here = np.s_[top : top + a, left : left + b]
                    total = np.zeros((a, b))
                    for i in range(n):
                        delta = deltas[i][name].reshape(rows, columns)  # a view
                        g = gs[i][name].reshape(rows, columns)
                        d = 0.999 * delta[here] + rate * g[here]
                        c = fft.dctn(d, norm="ortho").ravel()
                        c[np.argsort(-abs(c))[chosen:]] = 0
                        delta[here] = d - fft.idctn(c.reshape(a, b), norm="ortho")
                        total += c.reshape(a, b)
                    update[here] = np.sign(fft.idctn(total / n, norm="ortho"))
            p[name] = p[name] - rate * update.reshape(p[name].shape)
    return [p] * n


def signs(x):
    """The signs of x times the one magnitude that is sent with them."""
    if not x.size:
        return x
    return np.where(x >= 0, 1, -1) * np.linalg.norm(x) / np.sqrt(x.size)


def one_bit_lamb(params, grads, *, rate, warmup, decay, eps=1e-6):
    p, n = wide(params), len(grads[0])
    names = sorted(p)
    m, v = ({name: np.zeros_like(p[name]) for name in names} for _ in range(2))
    ratio, factor = dict.fromkeys(names, 0.0), dict.fromkeys(names, 1.0)
    norm = np.linalg.norm
    for gs in grads[:warmup]:
        g = mean(gs)
        for name in names:
            m[name] = 0.9 * m[name] + 0.1 * g[name]
            v[name] = 0.999 * v[name] + 0.001 * g[name] ** 2
            u = m[name] / (np.sqrt(v[name]) + eps) + decay * p[name]
            c = np.clip(norm(p[name]) / norm(u), 0.01, 10)
            ratio[name] = 0.9 * ratio[name] + 0.1 * c
            p[name] = p[name] - rate * c * u

    rms = {name: np.sqrt(np.mean(m[name] ** 2)) for name in names}
    scale = {name: np.mean(list(rms.values())) / rms[name] for name in names}
    fresh = dict(v)
    d = sum(x.size for x in p.values())
    width = -(-d // (8 * n)) * 8  # of the slice that a worker owns
    errors = [np.zeros(d) for _ in range(n)]
    owned = [np.zeros(len(range(d)[i * width : (i + 1) * width])) for i in range(n)]
    for gs in grads[warmup:]:
        sent = []
        for i in range(n):
            x = {k: (0.9 * m[k] + 0.1 * gs[i][k]) * scale[k] for k in names}
            x = flat(x) + errors[i]
            sent.append(signs(x))
            errors[i] = x - sent[i]
        average = np.mean(sent, 0)
        slices = []
        for i in range(n):
            y = average[i * width : (i + 1) * width] + owned[i]
            slices.append(signs(y))
            owned[i] = y - slices[i]
        new = unflat(np.concatenate(slices), p)
        for k in names:
            new[k] = np.where(v[k] > 0, new[k] / scale[k], 0)
            g = (new[k] - 0.9 * m[k]) / 0.1
            fresh[k] = 0.999 * fresh[k] + 0.001 * g**2
            u0 = new[k] / (np.sqrt(v[k]) + eps)
            u = u0 + decay * p[k]
            f = np.max((np.sqrt(v[k]) + eps) / (np.sqrt(fresh[k]) + eps))
            share = min(1, norm(u0) / norm(u))
            f = np.clip(share * f + 1 - share, 0.5, 4)
            factor[k] = np.clip(f, 0.9 * factor[k], 1.1 * factor[k])
            p[k] = p[k] - rate * ratio[k] * factor[k] * u
        m = new
    return [p] * n
