"""A worker's own momentum: what is sent of it, and what is kept."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from slamb_jax._core.moments import bias, weights
from slamb_jax._core.platform import after_exchange
from slamb_jax._core.rounding import next_step


class Rule(NamedTuple):
    """How the momentum is exchanged; see :func:`slamb_jax.average_momentum`."""

    share: ArrayLike | None
    nesterov: bool
    bias_correction: bool
    overlap: bool

    @property
    def keeps_what_is_sent(self) -> bool:
        """Whether the momentum that is kept is a multiple of what is sent."""
        return self.share is None and not self.nesterov and not self.overlap


class OwnMomentum:
    r"""The momentum of one leaf: what a worker sends of it, and what it keeps.

    It keeps c m, where c is the share of m in what is sent, so that errors have a place
    where c is 0. With ``overlap``, which sends what the last step left, it keeps m.

    Attributes:
      sent: :math:`x_i / (1-\beta_1^t)`, float32.
    """

    def __init__(
        self, g: jax.Array, m: jax.Array, b1: ArrayLike, step: jax.Array, rule: Rule
    ) -> None:
        self._given, self._rule, self._step = (g, m, b1), rule, step
        self._g, self._m = g.astype(jnp.float32), m.astype(jnp.float32)
        self._b1, self._new = weights(b1)
        self._c = weights(b1 if rule.share is None else rule.share)[0]
        if rule.nesterov and not rule.overlap:
            self._c = self._b1 * self._b1

        def fix(t: jax.Array) -> jax.Array:
            # At t = 0, the first step with overlap, it would divide 0 by 0.
            one = jnp.float32(1)
            return jnp.maximum(bias(b1, t), 1e-7) if rule.bias_correction else one

        if rule.overlap:
            self._fix = fix(step - 1)
            self.sent = self._m / self._fix
        elif rule.nesterov:
            self._fix = fix(next_step(step))
            of_g = self._b1 * self._new / self._fix + self._new / fix(step)
            self.sent = self._m / self._fix + of_g * self._g
        else:
            self._fix = fix(step)
            self.sent = (self._m + (1 - self._c) * self._g) / self._fix

    def kept(self) -> jax.Array:
        """The momentum to keep, float32."""
        weight = self._new if self._rule.overlap else self._c * self._new
        return self._b1 * self._m + weight * self._g

    def again(
        self, size: jax.Array, sent: jax.Array, *, skips: bool
    ) -> tuple[jax.Array, jax.Array]:
        """For the step after the exchange: what was sent in units, and :meth:`kept`.

        Args:
          size: of the units.
          sent: :attr:`sent` in units, to compute both from it where that is right.
          skips: whether the old momentum may be needed later.
        """
        g, m, b1 = self._given

        def anew(g: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
            momentum = OwnMomentum(g, m, b1, self._step, self._rule)
            return momentum.sent / size, momentum.kept()

        def of_sent(sent: jax.Array) -> tuple[jax.Array, jax.Array]:
            return sent, self._c * (self._fix * (size * sent))

        in_place = self._rule.keeps_what_is_sent and not skips
        return after_exchange(anew, of_sent if in_place else None, g, m, sent)

    def of_error(self, error: jax.Array) -> jax.Array:
        """What is kept of an error of :attr:`sent`.

        The recurrence adds (1 - b1) / b1 of it to m, and b1 m is stored. ``fix`` undoes
        the bias correction of what was sent.
        """
        return self._new * self._fix * error
