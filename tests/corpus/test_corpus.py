"""Every network of the corpus by every way: right, or refused by an error that names a module.

By default all networks take the cheap ways, and a few exports and training steps, chosen so that each
export meets several kinds of networks. The whole grid is slow.
"""

import logging

import pytest

from tests.corpus import ways
from tests.corpus.modules import CASES

_CHEAP = ("convert", "revert", "fold_module")
_EXPORTS = [*ways.EXPORTS]
_STEPS = ("hook that reads another module",)


def _is_default(index: int, name: str, way: str) -> bool:
    if way in _CHEAP:
        return True
    if way == "training_step":
        return name in _STEPS
    # Tracing with torch.export costs ten times as much as with TorchScript.
    stride = 48 if way.startswith("dynamo") else 8
    return (index + _EXPORTS.index(way)) % stride == 0


def _cells():
    for way in ways.WAYS:
        for index, name in enumerate(CASES):
            marks = () if _is_default(index, name, way) else pytest.mark.slow
            yield pytest.param(name, way, id=f"{name}-{way}", marks=marks)


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "way"), _cells())
def test_right_or_refused_by_name(name, way, tmp_path):
    result = ways.outcome(CASES[name], way, tmp_path)
    assert result == ("refused" if way in CASES[name].refused else "right")


def test_every_refusal_is_one_of_a_way_that_exists():
    for name, case in CASES.items():
        assert case.refused <= set(ways.WAYS), name


def test_the_corpus_sees_what_conversion_drops(monkeypatch, tmp_path):
    """The comparison itself: where the rule for subclasses is switched off, it reports wrong results."""
    from bnexport.sync_bn import recognition

    monkeypatch.setattr(recognition, "_changes", lambda *_: ())
    with pytest.raises(ways.Wrong):
        ways.convert(CASES["activation"], tmp_path)
