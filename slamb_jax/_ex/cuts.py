"""How arrays are cut into groups of blocks, and their codes among the workers."""

from collections.abc import Sequence

from slamb_jax._ex.payloads import Quantizer
from slamb_jax._ex.payloads.codes import BlockQuantizer, Shape

_MANY_ROWS = 512  # in a slice: that they fill groups does not count


def cut_of(
    sizes: Sequence[int], quantizer: BlockQuantizer, slices: int
) -> dict[Shape, tuple[list[int], Shape]]:
    """How arrays are cut: of each kind of group whose they are, and a slice of them.

    A long slice is of whole groups, another of some rows.
    """
    kinds: dict[Shape, list[int]] = {}
    for i, size in enumerate(sizes):
        if size:
            kinds.setdefault(quantizer.group_of(size), []).append(i)
    out = {}
    for cut in sorted(kinds, reverse=True):
        groups = sum(-(-sizes[i] // cut.size) for i in kinds[cut])
        rows = -(-groups * cut.rows // slices)
        each = cut._replace(rows=rows)
        if rows >= _MANY_ROWS:
            each = cut._replace(groups=-(-rows // cut.rows))
        out[cut] = kinds[cut], each
    return out


def slice_nbytes(sizes: Sequence[int], quantizer: Quantizer, slices: int) -> int:
    """Bytes of one slice of arrays: to its owner, and as many of its mean."""
    if not isinstance(quantizer, BlockQuantizer):
        return quantizer.nbytes(-(-sum(sizes) // slices))
    shapes = [each for _, each in cut_of(sizes, quantizer, slices).values()]
    return sum(map(quantizer.nbytes_of, shapes))
