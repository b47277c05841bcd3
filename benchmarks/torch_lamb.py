"""A plain PyTorch LAMB, leaf after leaf, to time beside the others."""

import time

import numpy as np

try:
    import torch
except ImportError:  # optional: only ever compared with
    torch = None


class TorchLamb:
    """LAMB as its paper has it, without decay, in place."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], rate: float = 1e-3):
        generator = torch.Generator().manual_seed(0)
        self.rate, self.count, self.times = rate, 0, []
        self.leaves = [
            [torch.randn(s, generator=generator) * 0.02, torch.zeros(s), torch.zeros(s)]
            for s in shapes.values()
        ]

    def take_turn(self, grads: dict[str, np.ndarray]) -> None:
        """One timed step."""
        start = time.perf_counter()
        self.count += 1
        fix1, fix2 = 1 - 0.9**self.count, 1 - 0.999**self.count
        for (p, m, v), g in zip(self.leaves, grads.values(), strict=True):
            g = torch.from_numpy(g)
            m.mul_(0.9).add_(g, alpha=0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            u = (m / fix1).div_((v / fix2).sqrt_().add_(1e-6))
            above, below = p.norm(), u.norm()
            ratio = above / below if above > 0 and below > 0 else 1.0
            p.sub_(u.mul_(self.rate * ratio))
        self.times.append(time.perf_counter() - start)
