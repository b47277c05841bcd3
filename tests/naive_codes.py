"""What each payload makes of an array, in float64 NumPy, from its formula."""

import numpy as np


def ternary(blocks):
    """Blocks (number, planes, width): signs of what is at least the mean, one size."""
    return _of_one_size(blocks, np.abs(blocks) >= _least(blocks))


def largest_of(count):
    """Of each ``count`` planes the largest, if it is at least the mean of the block."""

    def code(blocks):
        number, planes, width = blocks.shape
        size = np.abs(blocks)
        each = size.reshape(number, planes // count, count, width)
        largest = np.eye(count, dtype=bool)[each.argmax(2)].swapaxes(2, 3)
        sent = largest.reshape(blocks.shape) & (size > 0)
        return _of_one_size(blocks, sent & (size >= _least(blocks)))

    return code


def _least(blocks):
    """The mean magnitude, and a little less: of equal magnitudes all are large."""
    return (1 - 2.0**-16) * np.abs(blocks).mean((1, 2), keepdims=True)


def _of_one_size(blocks, sent):
    size, count = np.where(sent, np.abs(blocks), 0), sent.sum((1, 2), keepdims=True)
    return (
        np.sign(blocks)
        * sent
        * (size.sum((1, 2), keepdims=True) / np.maximum(count, 1))
    )


CODES = {"ternary": ternary}
CODES |= {f"largest_of_{count}": largest_of(count) for count in (2, 3, 7, 8, 31, 127)}


def in_blocks(x, group):
    """A flat array, padded, as (blocks, planes, width): row r of a group's planes."""
    x = np.pad(x, (0, -x.size % group.size)).reshape(-1, *group[1:])
    return x.swapaxes(1, 2).reshape(-1, group.planes, group.width)


def flat(blocks, group, size):
    """Undoes :func:`in_blocks`."""
    x = blocks.reshape(-1, group.rows, group.planes, group.width).swapaxes(1, 2)
    return x.reshape(-1)[:size]


def coded(name, x, group):
    """A flat array after it was sent by a payload that draws nothing."""
    blocks = in_blocks(np.asarray(x, np.float64), group)
    return flat(CODES[name](blocks), group, x.size)


def grid(bits, x, group):
    """The step of each element's uniform grid: its block's largest over the levels."""
    blocks = in_blocks(np.asarray(x, np.float64), group)
    step = np.abs(blocks).max((1, 2), keepdims=True) / (2 ** (bits - 1) - 1)
    return flat(np.broadcast_to(step, blocks.shape), group, x.size)
