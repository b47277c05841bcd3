"""BERT pre-training: masked-language modelling on text of yours.

Run from the root of the repository: ``python -m examples.bert.main`` for a tiny model
on the standard library's source, ``--config examples/bert/configs/large.yaml --files
DIR`` for phase 1 of BERT-Large.
"""

from examples.bert import train
from examples.common import loop

if __name__ == "__main__":
    loop.main(train, __doc__ or "")
