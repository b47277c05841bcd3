"""What each payload makes of an array, in float64 NumPy, from its formula."""

import numpy as np


def largest_of(count, blocks):
    """Of each ``count`` planes the largest, if it is at least the mean of the block.

    Blocks are of shape (number, planes, width). A count of 1 is the ternary code.
    """
    number, planes, width = blocks.shape
    size = np.abs(blocks)
    each = size.reshape(number, planes // count, count, width)
    largest = np.eye(count, dtype=bool)[each.argmax(2)].swapaxes(2, 3)
    # A little less than the mean: of equal magnitudes all are large.
    least = (1 - 2.0**-16) * size.mean((1, 2), keepdims=True)
    sent = largest.reshape(blocks.shape) & (size >= least) & (size > 0)
    total, number = ((x * sent).sum((1, 2), keepdims=True) for x in (size, sent))
    return np.sign(blocks) * sent * (total / np.maximum(number, 1))


COUNTS = {"ternary": 1} | {f"largest_of_{x}": x for x in (2, 3, 7, 8, 31, 127)}
BITS = {"uniform8": 8, "uniform4": 4}


def in_blocks(x, group):
    """A flat array, padded, as (blocks, planes, width): row r of a group's planes."""
    x = np.pad(x, (0, -x.size % group.size)).reshape(-1, *group[1:])
    return x.swapaxes(1, 2).reshape(-1, group.planes, group.width)


def flat(blocks, group, size):
    """Undoes :func:`in_blocks`."""
    x = blocks.reshape(-1, group.rows, group.planes, group.width).swapaxes(1, 2)
    return x.reshape(-1)[:size]


def coded(payload, x, group):
    """A flat array after it was sent by a payload that draws nothing."""
    blocks = in_blocks(np.asarray(x, np.float64), group)
    return flat(largest_of(COUNTS[payload], blocks), group, x.size)


def grid(payload, x, group):
    """The step of each element's uniform grid: its block's largest over the levels."""
    blocks = in_blocks(np.asarray(x, np.float64), group)
    step = np.abs(blocks).max((1, 2), keepdims=True) / (2 ** (BITS[payload] - 1) - 1)
    return flat(np.broadcast_to(step, blocks.shape), group, x.size)
