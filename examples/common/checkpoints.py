"""Checkpoints by Orbax: every replica and the data's position, written while training.

Nothing else here knows Orbax.
"""

from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints of one run, the newest two kept."""

    def __init__(self, folder: Path) -> None:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=True
        )
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.manager.close()  # after what is being written

    def latest(self) -> int | None:
        """The step of the newest whole checkpoint."""
        step: int | None = self.manager.latest_step()
        return step

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Copies ``state`` and returns; threads write it."""
        if step == self.latest():
            return
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(position)
        )
        self.manager.save(step, args=arguments, force=True)

    def wait(self) -> None:
        """Until all that was saved is on disk."""
        self.manager.wait_until_finished()

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The state, laid out as ``like``, and the position."""
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(shapes), position=ocp.args.JsonRestore()
        )
        found = self.manager.restore(step, args=arguments)
        return found.state, found.position
