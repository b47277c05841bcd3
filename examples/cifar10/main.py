"""ResNet-110 on CIFAR-10, or a small ResNet on handwritten digits.

Run from the root of the repository: ``python -m examples.cifar10.main`` for the digits,
``--config examples/cifar10/configs/slamb.yaml --data-dir DIR`` for CIFAR-10.
"""

from examples.cifar10 import train
from examples.common import loop

if __name__ == "__main__":
    loop.main(train, __doc__ or "")
