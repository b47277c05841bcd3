"""BERT pre-training: masked-language modelling on text of yours.

Run from the root of the repository: ``python -m examples.bert.main`` for a tiny model
on the standard library's source, ``--config examples/bert/configs/large.yaml --files
DIR`` for phase 1 of BERT-Large.
"""

from examples.bert.train import Config, sources, task
from examples.common import loop, options, processes


def main(config: Config) -> loop.Result:
    mesh = processes.start(config)
    result = loop.run(task(config, sources(config)), config, mesh)
    loop.summary(result, config)
    return result


if __name__ == "__main__":
    main(options.parse(Config, __doc__ or ""))
