"""All trials in order, and their counts."""

from __future__ import annotations

import collections
import dataclasses
import zlib
from collections.abc import Iterator

import numpy as np
import onnx

from bnexport.folding import sites
from bnexport.folding.branches import collapse
from bnexport.folding.rules import ALL
from bnexport.verification.proof.lemmas import LEMMAS
from tests.forms import placements, trial
from tests.forms.case import SHAPES, Case, Setting, Shape, schema, versions
from tests.forms.engine import Engine, Refused, newest_opset
from tests.forms.placements import PLACES, Impossible, Result
from tests.forms.recipes import RECIPES, Recipe

# Named by a rule, but no operator on floats, or of another domain.
EXCLUDED = {"DequantizeLinear", "MMCVDeformConv2d", "MMCVModulatedDeformConv2d", "Size"}


def named() -> set[str]:
    """Return the operators that a rule of the folder or a lemma of the checker names."""
    rules = {op_type for rule in ALL for op_type in rule.op_types}
    readers = {*sites.OP_TYPES, *collapse.LINEAR}
    return rules | readers | {*LEMMAS}


@dataclasses.dataclass(frozen=True)
class Trial:
    """A form, how its model is made, and the number that decides everything random in it."""

    op_type: str
    version: int
    opset: int
    shape: Shape
    case: Case
    sibling: Case
    places: tuple[str, ...]
    seed: int

    def describe(self) -> str:
        return f"{self.op_type}-{self.version} (opset {self.opset}) {self.case} on {list(self.shape)}"


def trials(
    op_type: str, version: int, last: int, quota: int, sizes: int | None = None, recipe: Recipe | None = None
) -> Iterator[Trial]:
    """Yield the forms of one version of an operator.

    quota: for each shape, beyond forms with a choice that no form before had. sizes: how many shapes, None for all.
    recipe: None for that of RECIPES.
    """
    generator = np.random.default_rng(zlib.crc32(f"{op_type} {version}".encode()))
    order = range(len(SHAPES)) if sizes is None else generator.permutation(len(SHAPES))
    declared, covered, taken = schema(op_type, version), set[str](), 0
    for shape in (SHAPES[index] for index in order):
        setting = Setting(op_type, version, shape, generator)
        cases = list((recipe or RECIPES[op_type])(setting))
        if not cases:
            continue
        left = quota
        for place in generator.permutation(len(cases)):
            case = cases[place]
            news = case.tags(declared) - covered
            if not left and (not news or sizes is not None):
                continue
            left -= left > 0
            covered |= news
            places = tuple(str(generator.choice(names)) for names in PLACES.values())
            opset = int(generator.choice([version, last]))
            sibling = cases[generator.integers(len(cases))]
            yield Trial(op_type, version, opset, shape, case, sibling, places, int(generator.integers(1 << 30)))
        taken += 1
        if taken == sizes:
            return


def of_operator(op_type: str, quota: int, sizes: int | None = None, recipe: Recipe | None = None) -> Iterator[Trial]:
    """Yield the forms of all versions of an operator."""
    for first, last in versions(op_type, newest_opset()):
        yield from trials(op_type, first, last, quota, sizes, recipe)


@dataclasses.dataclass
class Row:
    """Counts of one operator. not_run: forms that ONNX Runtime refuses, which do not count. exchanged: pairs of forms."""

    forms: int = 0
    not_run: int = 0
    models: int = 0
    folded: int = 0
    kept: int = 0
    proved: int = 0
    undecided: int = 0
    exchanged: int = 0
    findings: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


def judge(one: Trial, row: Row) -> Iterator[tuple[str, trial.Finding]]:
    """Run one form in all its places; yield findings with the place."""
    try:
        result = computed(one, one.case)
    except Refused:
        row.not_run += 1
        return
    counted = False
    for place in one.places:
        try:
            proto = placements.build(one.op_type, one.case, place, one.shape, result, one.opset, one.seed)
            outcome = trial.attempt(proto, one.shape)
        except (Impossible, Refused):
            continue
        row.forms += not counted
        counted = True
        row.models += 1
        row.folded += outcome.status == "folded"
        row.kept += outcome.status == "kept"
        row.proved += outcome.proofs.count("passed")
        row.undecided += outcome.proofs.count("not_verified")
        findings = list(outcome.findings)
        # In one place: what the forms are next to says little about their difference; without rows they have none.
        if not findings and 0 not in one.shape and place == one.places[one.seed % len(one.places)]:
            findings = _exchanged(one, row, place, proto)
        row.findings.update(finding.kind for finding in findings)
        yield from ((place, finding) for finding in findings)


def computed(one: Trial, case: Case) -> Result:
    bare, inputs = placements.bare(one.op_type, case, one.shape, one.opset)
    output = np.asarray(Engine(bare).run(inputs)[0])
    return Result(output.shape, output.dtype)


def _exchanged(one: Trial, row: Row, place: str, proto: onnx.ModelProto) -> list[trial.Finding]:
    """Put another form of the same operator in the place of this one, all else equal."""
    try:
        result = computed(one, one.sibling)
        other = placements.build(one.op_type, one.sibling, place, one.shape, result, one.opset, one.seed)
        found = list(trial.exchange(proto, other, one.shape))
    except (Impossible, Refused):
        return []
    row.exchanged += 1
    return [trial.Finding(each.kind, f"{one.sibling} instead: {each.text}") for each in found]
