"""ResNet-110 on CIFAR-10, or a small ResNet on handwritten digits.

Run from the root of the repository: ``python -m examples.cifar10.main`` for the digits,
``--config examples/cifar10/configs/slamb.yaml --data-dir DIR`` for CIFAR-10.
"""

from examples.cifar10.train import Config, sources, task
from examples.common import loop, options, processes


def main(config: Config) -> loop.Result:
    mesh = processes.start(config)
    result = loop.run(task(config, sources(config)), config, mesh)
    loop.summary(result, config)
    return result


if __name__ == "__main__":
    main(options.parse(Config, __doc__ or ""))
