"""What an older torch lacks, by its version alone: no error of the package turns a test into a skip."""

import pytest
import torch


def _needs(way: str, *version: int) -> pytest.MarkDecorator:
    wanted, found = ".".join(map(str, version)), torch.__version__
    older = tuple(int(number) for number in found.split("+")[0].split(".")[:2]) < version
    return pytest.mark.skipif(older, reason=f"{way} needs torch {wanted} or newer, got {found}")


needs_dynamo = _needs("the dynamo exporter", 2, 9)
needs_training_step = _needs("a training step", 2, 9)
