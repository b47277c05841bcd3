"""Swin Transformer on ImageNet, or a small one on handwritten digits.

Run from the root of the repository: ``python -m examples.swin.main`` for the digits,
``--config examples/swin/configs/base.yaml --data-dir DIR`` for ImageNet.
"""

from examples.common import loop
from examples.swin import train

if __name__ == "__main__":
    loop.main(train, __doc__ or "")
