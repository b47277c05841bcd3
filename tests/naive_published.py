"""Published methods in plain NumPy, worker by worker and equation by equation.

Each function takes the parameters, gradients as ``grads[t][i]`` of worker i, and gives
the parameters of every worker in the end. Float64 throughout.
"""

import collections

import numpy as np
import optax
from scipy import fft

from slamb_jax.exchange.codecs import CODECS
from tests.naive import coded


def wide(tree):
    return {name: np.asarray(x, np.float64) for name, x in tree.items()}


def mean(trees):
    return {name: np.mean([t[name] for t in trees], 0) for name in trees[0]}


def stepped(params, grads, way):
    """All take one step: ``way(t, k, gs, p)`` is that of leaf k at step t from 1."""
    p = wide(params)
    for t, gs in enumerate(grads, 1):
        for k in p:
            p[k] = p[k] - way(t, k, [np.float64(g[k]) for g in gs], p[k])
    return [p] * len(grads[0])


def memory():
    """Arrays by worker and leaf that begin as 0."""
    return collections.defaultdict(float)


class Optax:
    """An optimizer of optax as the local one, in float32."""

    def __init__(self, tx, params):
        self.tx, self.state = tx, tx.init(params)

    def __call__(self, params, grads):
        narrow = {k: np.float32(x) for k, x in params.items()}
        u, self.state = self.tx.update(grads, self.state, narrow)
        return {k: x + np.float64(u[k]) for k, x in params.items()}


def dense(params, grads, *, optimizer, dtype=np.float32):
    """An optimizer of optax on mean gradients, as float32, of what is rounded first."""
    p, step = wide(params), Optax(optimizer, params)
    for gs in grads:
        rounded = [{k: np.float32(x.astype(dtype)) for k, x in g.items()} for g in gs]
        p = step(p, mean(rounded))
    return [p] * len(grads[0])


def signs(x):
    """In one bit: signs, and one magnitude for each block."""
    group = CODECS["sign"].group_of(x.size)
    return coded("sign", x.ravel(), group).reshape(x.shape)


def one_bit(params, grads, *, rate, warmup, eps, scaled):
    """Of two workers, who send each other their codes, and encode no mean."""
    m, v = memory(), memory()

    def way(t, k, gs, p):
        xs = [0.9 * m[i, k] + 0.1 * g for i, g in enumerate(gs)]
        sent = [signs(x) if t > warmup else x for x in xs]
        shared = np.mean(sent, 0)
        for i, (x, q) in enumerate(zip(xs, sent, strict=True)):
            m[i, k] = q + (x - q) / 0.9
        hat = shared / (1 - 0.9**t)
        if t <= warmup:
            v[k] = 0.999 * v[k] + 0.001 * hat**2
        root = np.sqrt(v[k] / (1 - 0.999 ** min(t, warmup)))
        u = np.where(v[k] > 0, hat / (root + eps), 0.0)
        return rate * u * (np.linalg.norm(p) / np.linalg.norm(u) if scaled else 1.0)

    return stepped(params, grads, way)


def vote(xs):
    """A zero and a tie count as plus."""
    votes = sum(np.where(x >= 0, 1, -1) for x in xs)
    return np.where(votes >= 0, 1, -1)


def signsgd(params, grads, *, rate):
    return stepped(params, grads, lambda t, k, gs, p: rate * vote(gs))


def distributed_lion(params, grads, *, rate, decay):
    m = memory()

    def way(t, k, gs, p):
        u = vote([0.9 * m[i, k] + 0.1 * g for i, g in enumerate(gs)])
        for i, g in enumerate(gs):
            m[i, k] = 0.99 * m[i, k] + 0.01 * g
        return rate * (u + decay * p)

    return stepped(params, grads, way)


def largest(x, count):
    """Where the largest entries are, row by row."""
    mask = np.zeros(x.shape, bool)
    np.put_along_axis(mask, np.argsort(-abs(x), -1)[..., :count], True, -1)
    return mask


def dgc(params, grads, *, rate, share):
    u, v = memory(), memory()

    def way(t, k, gs, p):
        sent = []
        for i, g in enumerate(gs):
            u[i, k] = 0.9 * u[i, k] + g
            v[i, k] = v[i, k] + u[i, k]
            mask = largest(v[i, k].ravel(), max(1, round(share * g.size)))
            mask = mask.reshape(g.shape)
            sent.append(np.where(mask, v[i, k], 0.0))
            u[i, k], v[i, k] = (np.where(mask, 0.0, x[i, k]) for x in (u, v))
        return rate * np.mean(sent, 0)

    return stepped(params, grads, way)


def powersgd_sgd(params, grads, *, rate, first_q):
    """``first_q``: the first Q of each leaf; empty for one that is sent whole."""
    q, errors = wide(first_q), memory()

    def way(t, k, gs, p):
        if not q[k].size:
            return rate * np.mean(gs, 0)
        xs = [(g + errors[i, k]).reshape(-1, len(q[k])) for i, g in enumerate(gs)]
        product = np.mean([x @ q[k] for x in xs], 0)
        basis = np.linalg.svd(product, full_matrices=False)[0]
        q[k] = np.mean([x.T @ basis for x in xs], 0)
        for i, x in enumerate(xs):
            errors[i, k] = (x - basis @ basis.T @ x).reshape(p.shape)
        return rate * (basis @ q[k].T).reshape(p.shape)

    return stepped(params, grads, way)


def mean_sent(xs, waits, k, decay, send):
    """The mean of what workers send of their x and of what waited; the rest waits."""
    sent = []
    for i, x in enumerate(xs):
        whole = decay * waits[i, k] + x
        sent.append(send(whole))
        waits[i, k] = whole - sent[i]
    return np.mean(sent, 0)


def two_bits(x, share):
    """Of each 4096 the largest, by sign and one of two magnitudes; 0 elsewhere."""
    out, width = np.zeros(x.size), min(4096, x.size)
    for start in range(0, x.size, width):
        chunk = np.pad(x.ravel()[start : start + width], (0, width))[:width]
        places = np.argsort(-abs(chunk), kind="stable")[: max(1, round(share * width))]
        sizes = abs(chunk[places])
        high = sizes > (sizes[0] + sizes[-1]) / 2
        for place, big in zip(places, high, strict=True):
            magnitude = sizes[high].mean() if big else sizes[~high].mean()
            if start + place < x.size:
                out[start + place] = -magnitude if chunk[place] < 0 else magnitude
    return out.reshape(x.shape)


def sparseloco(params, grads, *, rate, every, share):
    """With local steps of SGD, whose sizes have no ties, as the first ones of Adam."""
    waits = memory()
    rounds = [  # of a worker the mean of its gradients, whose steps are its way
        [mean(own) for own in zip(*grads[t : t + every], strict=True)]
        for t in range(0, len(grads), every)
    ]

    def way(t, k, gs, p):
        ways = [rate * every * g for g in gs]
        return mean_sent(ways, waits, k, 0.95, lambda x: two_bits(x, share))

    return stepped(params, rounds, way)


def demo(params, grads, *, rate, chosen, matrix):
    """``matrix``: of each leaf rows and columns."""
    errors = memory()

    def side(size):
        return max(s for s in range(1, 65) if size % s == 0)

    def largest_components(chunks):
        c = fft.dctn(chunks, norm="ortho", axes=(1, 3)).swapaxes(1, 2)
        flat = c.reshape(*c.shape[:2], -1)
        c = np.where(largest(flat, chosen), flat, 0.0).reshape(c.shape)
        return fft.idctn(c.swapaxes(1, 2), norm="ortho", axes=(1, 3))

    def way(t, k, gs, p):
        (rows, columns), step = matrix[k], rate(t - 1)
        a, b = side(rows), side(columns)
        chunks = [step * g.reshape(rows // a, a, columns // b, b) for g in gs]
        sent = mean_sent(chunks, errors, k, 0.999, largest_components)
        return step * np.sign(sent).reshape(p.shape)

    return stepped(params, grads, way)


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
    """``rows``: those that are sent, of each leaf of ``matrix`` at each step."""
    m = memory()
    rest = {k: x for k, x in params.items() if k not in matrix}
    adam, others = Optax(optax.adam(rate / 3), rest), wide(rest)
    for gs in grads:
        others = adam(others, mean([{k: g[k] for k in rest} for g in gs]))

    def way(t, k, gs, p):
        chosen, shape = rows[t - 1][k], matrix[k]
        for i, g in enumerate(gs):
            m[i, k] = m[i, k] + g.reshape(shape)
        u = np.zeros(shape)
        u[chosen] = orthogonal(np.mean([m[i, k][chosen] for i in range(len(gs))], 0))
        for i in range(len(gs)):
            m[i, k][chosen] *= momentum
        return rate * max(1, shape[1] / shape[0]) ** 0.5 * u.reshape(p.shape)

    of_matrices = {k: x for k, x in params.items() if k in matrix}
    return [p | others for p in stepped(of_matrices, grads, way)]
