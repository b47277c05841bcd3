"""Published methods in plain NumPy, worker by worker and equation by equation.

Each function takes the parameters, gradients as ``grads[t][i]`` of worker i, and gives
the parameters of every worker in the end. Float64 throughout.
"""

import numpy as np
import optax
from scipy import fft

from tests import naive


def wide(tree):
    return {name: np.asarray(x, np.float64) for name, x in tree.items()}


def like(tree):
    return {name: np.zeros(x.shape) for name, x in tree.items()}


def mean(trees):
    return {name: np.mean([t[name] for t in trees], 0) for name in trees[0]}


def dense(params, grads, *, optimizer, dtype=np.float32):
    """An optimizer of optax on mean gradients, as float32, of what is rounded first."""
    p, state = params, optimizer.init(params)
    for gs in grads:
        rounded = [{k: np.float32(x.astype(dtype)) for k, x in g.items()} for g in gs]
        updates, state = optimizer.update(mean(rounded), state, p)
        p = optax.apply_updates(p, updates)
    return [p] * len(grads[0])


def slamb(params, grads, *, rate, masks, every, b3):
    """``masks[t]`` of each leaf: the coordinates that are sent at a step."""
    alone = {"optimizer": "slamb", "sync_every": every, "b2": 0.999, "eps": 1e-6}
    given = naive.PLAIN | alone | {"b3": b3, "decays": [False] * len(params)}
    workers = naive.Workers([*wide(params).values()], len(grads[0]), given)
    for gs, mask in zip(grads, masks, strict=True):
        workers.step([np.stack([g[k] for g in gs]) for k in params], rate, mask)
    return [
        {k: p[i] for k, p in zip(params, workers.p, strict=True)}
        for i in range(len(grads[0]))
    ]


class Signs:
    """The mean in one bit: signs and one magnitude for each block, twice."""

    def __init__(self, params, workers):
        self.n, owned = workers, {True: [], False: []}
        for name in sorted(params):
            size = params[name].size
            blocks = -(-size // self.block(size))
            owned[size < 2048] += [(name, i) for i in range(blocks)]
        self.owner = {
            block: place // -(-len(blocks) // workers)
            for blocks in owned.values()
            for place, block in enumerate(blocks)
        }

    def block(self, size):
        return 256 if size < 2048 else 512

    def coded(self, x):
        out, step = np.zeros(x.size), self.block(x.size)
        for start in range(0, x.size, step):
            part = x.ravel()[start : start + step]
            size = np.abs(part).sum() / max(1, np.count_nonzero(part))
            out[start : start + step] = np.where(part >= 0, size, -size)
        return out.reshape(x.shape)

    def __call__(self, name, xs):
        """The mean for all, and what each worker did not send of its x."""
        q = [self.coded(x) for x in xs]
        average = np.mean(q, 0)
        shared = self.coded(average)
        lost, waits = self.n * (average - shared).ravel(), []
        step = self.block(lost.size)
        for i in range(self.n):
            e = (xs[i] - q[i]).ravel()
            for start in range(0, lost.size, step):
                if self.owner[name, start // step] == i:
                    e[start : start + step] += lost[start : start + step]
            waits.append(e.reshape(xs[i].shape))
        return shared, waits


def one_bit(params, grads, *, rate, warmup, eps, scaled):
    p, n = wide(params), len(grads[0])
    m, v, signs = [like(p) for _ in range(n)], like(p), Signs(p, n)
    for t, gs in enumerate(grads, 1):
        seen = min(t, warmup)
        for k in p:
            xs = [0.9 * m[i][k] + 0.1 * gs[i][k] for i in range(n)]
            if t <= warmup:
                shared, waits = np.mean(xs, 0), [0.0] * n
            else:
                shared, waits = signs(k, xs)
            for i in range(n):  # m = q + e / b1, where q = x - e
                m[i][k] = xs[i] - waits[i] + waits[i] / 0.9
            hat = shared / (1 - 0.9**t)
            if t <= warmup:
                v[k] = 0.999 * v[k] + 0.001 * hat**2
            root = np.sqrt(v[k] / (1 - 0.999**seen))
            u = np.where(v[k] > 0, hat / (root + eps), 0.0)
            c = np.linalg.norm(p[k]) / np.linalg.norm(u) if scaled else 1.0
            p[k] = p[k] - rate * c * u
    return [p] * n


def vote(xs):
    """A zero and a tie count as plus."""
    votes = sum(np.where(x >= 0, 1, -1) for x in xs)
    return np.where(votes >= 0, 1, -1)


def signsgd(params, grads, *, rate):
    p = wide(params)
    for gs in grads:
        for k in p:
            p[k] = p[k] - rate * vote([g[k] for g in gs])
    return [p] * len(grads[0])


def distributed_lion(params, grads, *, rate, decay):
    p, n = wide(params), len(grads[0])
    m = [like(p) for _ in range(n)]
    for gs in grads:
        for k in p:
            u = vote([0.9 * m[i][k] + 0.1 * gs[i][k] for i in range(n)])
            for i in range(n):
                m[i][k] = 0.99 * m[i][k] + 0.01 * gs[i][k]
            p[k] = p[k] - rate * (u + decay * p[k])
    return [p] * n


def largest(x, count):
    """Where the largest entries are, row by row."""
    mask = np.zeros(x.shape, bool)
    np.put_along_axis(mask, np.argsort(-abs(x), -1)[..., :count], True, -1)
    return mask


def dgc(params, grads, *, rate, share):
    p, n = wide(params), len(grads[0])
    us, vs = ([like(p) for _ in range(n)] for _ in range(2))
    for gs in grads:
        for k in p:
            sent = []
            for u, v, g in zip(us, vs, gs, strict=True):
                u[k] = 0.9 * u[k] + g[k]
                v[k] = v[k] + u[k]
                count = max(1, round(share * v[k].size))
                mask = largest(v[k].ravel(), count).reshape(v[k].shape)
                sent.append(np.where(mask, v[k], 0.0))
                u[k], v[k] = np.where(mask, 0.0, u[k]), np.where(mask, 0.0, v[k])
            p[k] = p[k] - rate * np.mean(sent, 0)
    return [p] * n


def powersgd_sgd(params, grads, *, rate, first_q):
    """``first_q``: the first Q of each leaf; empty for one that is sent whole."""
    p, n, q = wide(params), len(grads[0]), wide(first_q)
    errors = [like(p) for _ in range(n)]
    for gs in grads:
        for k in p:
            xs = [gs[i][k] + errors[i][k] for i in range(n)]
            u = np.mean(xs, 0)
            if q[k].size:
                xs = [x.reshape(-1, len(q[k])) for x in xs]
                product = np.mean([x @ q[k] for x in xs], 0)
                basis = np.linalg.svd(product, full_matrices=False)[0]
                q[k] = np.mean([x.T @ basis for x in xs], 0)
                u = (basis @ q[k].T).reshape(u.shape)
                for i, x in enumerate(xs):
                    errors[i][k] = (x - basis @ basis.T @ x).reshape(u.shape)
            p[k] = p[k] - rate * u
    return [p] * n


class Adam:
    """Of one worker, by leaf."""

    def __init__(self, rate):
        self.rate, self.t, self.m, self.v = rate, 0, {}, {}

    def __call__(self, params, grads):
        self.t += 1
        return {k: p + self.step(k, grads[k]) for k, p in params.items()}

    def step(self, k, g):
        self.m[k] = 0.9 * self.m.get(k, 0.0) + 0.1 * g
        self.v[k] = 0.999 * self.v.get(k, 0.0) + 0.001 * g**2
        m, v = self.m[k] / (1 - 0.9**self.t), self.v[k] / (1 - 0.999**self.t)
        return -self.rate * m / (np.sqrt(v) + 1e-8)


class Optax:
    """An optimizer of optax as the local one, in float32."""

    def __init__(self, tx, params):
        self.tx, self.state = tx, tx.init(params)

    def __call__(self, params, grads):
        narrow = {k: np.float32(x) for k, x in params.items()}
        u, self.state = self.tx.update(grads, self.state, narrow)
        return {k: x + np.float64(u[k]) for k, x in params.items()}


def outer(params, grads, *, local, every, step, sent=None):
    """Local steps, and an outer ``step`` along the mean of what is sent of the way.

    ``sent(i, k, x)``: what worker i sends of the way x of a leaf; None: all.
    """
    anchor, n = wide(params), len(grads[0])
    workers, locals_ = [anchor] * n, [local() for _ in range(n)]
    for t, gs in enumerate(grads, 1):
        workers = [f(p, g) for f, p, g in zip(locals_, workers, gs, strict=True)]
        if t % every == 0:
            ways = [{k: p[k] - anchor[k] for k in p} for p in workers]
            if sent is not None:
                ways = [
                    {k: sent(i, k, x) for k, x in way.items()}
                    for i, way in enumerate(ways)
                ]
            anchor = {k: anchor[k] + step(k, mean(ways)[k]) for k in anchor}
            workers = [anchor] * n
    return workers


def diloco(params, grads, *, local, every, rate, momentum):
    trace = {}

    def nesterov(k, way):
        trace[k] = momentum * trace.get(k, 0.0) + way
        return rate * (momentum * trace[k] + way)

    return outer(params, grads, local=local, every=every, step=nesterov)


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


def grid(name, x):
    """The step from one of the values that a drawn code may have to the next."""
    width = {"TernGrad": 640, "natural": 256}[name]
    blocks = np.pad(np.float64(x), (0, -x.size % width)).reshape(-1, width)
    step = np.broadcast_to(np.abs(blocks).max(1, keepdims=True), blocks.shape)
    if name == "natural":  # from one power of two to the next
        size = np.abs(np.where(blocks == 0, step, blocks))
        step = 2.0 ** np.floor(np.log2(size))
    return step.reshape(-1)[: x.size]


def sparseloco(params, grads, *, rate, every, share):
    """With local steps of SGD, whose sizes have no ties, as the first ones of Adam."""
    waits = {}

    def sgd(p, g):
        return {k: x - rate * g[k] for k, x in p.items()}

    def sent(i, k, way):
        x = 0.95 * waits.get((i, k), 0.0) + way
        waits[i, k] = x - (q := two_bits(x, share))
        return q

    alike = {"local": lambda: sgd, "step": lambda k, way: way}
    return outer(params, grads, every=every, sent=sent, **alike)


def demo(params, grads, *, rate, chosen, matrix):
    """``matrix``: of each leaf rows and columns."""
    p, n = wide(params), len(grads[0])
    errors = [like(p) for _ in range(n)]

    def side(size):
        return max(s for s in range(1, 65) if size % s == 0)

    for t, gs in enumerate(grads):
        for k, (rows, columns) in matrix.items():
            a, b = side(rows), side(columns)
            update = np.zeros((rows, columns))
            for top in range(0, rows, a):
                for left in range(0, columns, b):
                    here = np.s_[top : top + a, left : left + b]
                    total = np.zeros((a, b))
                    for i in range(n):
                        error = errors[i][k].reshape(rows, columns)  # a view
                        g = gs[i][k].reshape(rows, columns)
                        x = 0.999 * error[here] + rate(t) * g[here]
                        c = fft.dctn(x, norm="ortho").ravel()
                        c[~largest(c, chosen)] = 0
                        error[here] = x - fft.idctn(c.reshape(a, b), norm="ortho")
                        total += c.reshape(a, b)
                    update[here] = np.sign(fft.idctn(total / n, norm="ortho"))
            p[k] = p[k] - rate(t) * update.reshape(p[k].shape)
    return [p] * n


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
    adam = Adam(rate / 3)
    for t, gs in enumerate(grads):
        rest = {k: x for k, x in p.items() if k not in matrix}
        p |= adam(rest, mean([wide(g) for g in gs]))
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
