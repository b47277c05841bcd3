"""Swin Transformer on ImageNet, or a small one on handwritten digits.

Run from the root of the repository: ``python -m examples.swin.main`` for the digits,
``--config examples/swin/configs/base.yaml --data-dir DIR`` for ImageNet.
"""

from examples.common import loop, options, processes
from examples.swin.train import Config, sources, task


def main(config: Config) -> loop.Result:
    mesh = processes.start(config)
    result = loop.run(task(config, sources(config)), config, mesh)
    loop.summary(result, config)
    return result


if __name__ == "__main__":
    main(options.parse(Config, __doc__ or ""))
