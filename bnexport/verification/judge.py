"""The one judge of files, exports and modules: a candidate's outputs against its reference's, for the same inputs x.

1. They are within the bounds of `comparison`, or within those of both to the reference in float64.
2. Columns of an output that are far smaller than others are within bounds relative to their own size, with some margin.
3. An output that is empty for all inputs shows nothing.
4. Where the reference is not finite, or no better than rounding error, x / 8, x / 64, ... decide (`smaller_inputs`).

Any engine is a candidate. A reference is one that computes in float64, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from bnexport import tolerances
from bnexport.errors import BnexportError, VerificationError
from bnexport.runtime.engine import Engine
from bnexport.tolerances import Tolerance
from bnexport.verification.comparison import (
    SCALES,
    as_hidden,
    coarser,
    compare_output,
    compare_with_truth,
    is_finite,
    is_float,
    scaled,
    shows_inputs,
    with_smaller,
)
from bnexport.verification.inputs import FeedGroup
from bnexport.verification.probing import Selection, Tail, split, without_masked, without_ties
from bnexport.verification.verdict import OutputComparison, Verification, nearest

Rows = list[list[Any]]
Named = Mapping[str, Any]
# A column is small below this share of the largest; its own bound then is that of the table times the margin.
_SMALL, _MARGIN = 1 / 16, 16.0
# Computes rows in float64 at its first call; None where that fails.
Truth = Callable[[], Rows | None]


class ReferenceEngine(Engine, Protocol):
    """An engine that knows the truth."""

    def exact(self, feeds: Sequence[Named], outputs: Sequence[str]) -> Rows:
        """Return the values in float64, a row for each feed. Raises BnexportError."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """The models and settings of a comparison.

    outputs: names. working: the coarsest float type that the models compute in; an output's own may be coarser. atol, rtol:
    of the caller, instead of the table's. bound: returns a bound, instead of that of `comparison`, and the size of the data
    that an output averages, from its name and the reference's outputs by name. may_be_empty: whether an output without
    elements for all inputs passes.

    probes, parted, meetings: `Probe`, `Parted` and `Meeting` of a file by the names of their values. tail: makes the part
    of the reference from a value to an output.
    """

    outputs: Sequence[str]
    working: str = "float64"
    atol: float | None = None
    rtol: float | None = None
    bound: Callable[[str, Named], tuple[Tolerance | None, float]] = lambda name, references: (None, 0.0)
    may_be_empty: bool = True
    probes: Sequence[Named] = ()
    parted: Sequence[Named] = ()
    meetings: Sequence[Named] = ()
    tail: Callable[[str, str], Tail] | None = None

    @property
    def bounded(self) -> bool:
        return self.atol is not None or self.rtol is not None

    @property
    def shown(self) -> list[str]:
        """The names of the outputs and of the values in front of some, in the reference."""
        return [*self.outputs, *(probe["reference"] for probe in self.probes)]

    def names(self, which: str) -> list[str]:
        """Return names of values of the "reference" or the "candidate": the outputs, those in front of some, those at which
        windows end, and the indices that others are made of. Those that its outputs are concatenated of follow in the
        reference.
        """
        indices = [probe["selected"][which == "candidate"] for probe in self.probes if probe["selected"]]
        names = [*self.outputs, *(each[which] for each in (*self.probes, *self.meetings)), *indices]
        parts = [name for parted in self.parted for name in parted["values"]]
        return names + parts * (which == "reference")

    def common(self, rows: Rows) -> Rows:
        """Return what both models have, without numbers that a Softmax masks."""
        count, start = len(self.names("candidate")), len(self.outputs)
        shown = enumerate((*self.probes, *self.meetings), start)
        axes = {place: each["axis"] for place, each in shown if each["masking"]}
        return [
            [without_masked(value, axes[i]) if i in axes else value for i, value in enumerate(row[:count])]
            for row in rows
        ]


def judge(reference: ReferenceEngine, candidate: Engine, feeds: Sequence[FeedGroup], rules: Rules) -> Verification:
    """Return the verdict of the first group, if need be for smaller inputs; the other groups can only refute.

    Raises BnexportError where the candidate does not run, VerificationError where it has another number of outputs.
    """
    rows = [_run(candidate, group, rules) for group in feeds]
    result = joined([_compare(reference, group, got, rules) for group, got in zip(feeds, rows, strict=True)])
    if result.passed and not rules.may_be_empty:
        found = {output.name for output in result.outputs if output.elements}
        empty = next((name for name in rules.outputs if name not in found), None)
        if empty is not None:
            return dataclasses.replace(
                result, status="not_verified", reason=f"output {empty!r} is empty for all inputs"
            )
    first = feeds[0]
    decided = result.status == "failed" or (result.passed and all(map(is_finite, first.expected)))
    if decided or not any(is_float(value) for feed in first.inputs for value in feed.values()):
        return result
    for group, halved in _smaller(reference, first, rules.names("reference")):
        smaller = _compare(reference, group, _run(candidate, group, rules), rules, halved)
        if smaller.status != "not_verified":
            return smaller
    if result.passed:
        return result
    outputs = [
        output if output.decided else dataclasses.replace(output, reason=with_smaller(output.reason))
        for output in result.outputs
    ]
    return dataclasses.replace(result, reason=with_smaller(result.reason), outputs=tuple(outputs))


def joined(results: Sequence[Verification]) -> Verification:
    """Join the verdicts on groups: the first decides, unless another has failed.

    Of each output the comparison nearest to its bound is kept, of all that passed, or of all at the scale of a failure.
    """
    wrong = next((result for result in results if result.status == "failed"), None)
    first = results[0] if wrong is None else wrong
    if first.status == "not_verified":
        return first
    kept = [each for each in results if (each.passed if wrong is None else each.input_scale == wrong.input_scale)]
    outputs = nearest([output for each in kept for output in each.outputs])
    return dataclasses.replace(
        first,
        reason=Verification.of(outputs).reason,
        another=next((each.another for each in kept if each.another), ""),
        outputs=tuple(outputs),
        sizes=tuple(shapes for each in kept for shapes in each.sizes),
        samples=sum(each.samples for each in kept),
    )


def _run(candidate: Engine, group: FeedGroup, rules: Rules) -> Rows:
    names = rules.names("candidate")
    rows = [candidate.run(feed, names) for feed in group.inputs]
    for row, expected in zip(rows, group.expected, strict=True):
        if len(row) != len(names) or len(expected) < len(names):
            text = f"the exported model returns {len(row)} tensors, torch {len(expected)}"
            raise VerificationError(f"{candidate.name}: {text}")
    return rows


def _smaller(reference: Engine, first: FeedGroup, names: Sequence[str]) -> Iterator[tuple[FeedGroup, Rows]]:
    """Yield the inputs of a group made smaller, largest first, where the reference is finite, and its outputs for half of
    them.
    """
    for scale in SCALES:
        with contextlib.suppress(BnexportError):
            inputs = [scaled(feed, scale) for feed in first.inputs]
            expected = [reference.run(feed, names) for feed in inputs]
            if all(map(is_finite, expected)):
                halved = [reference.run(scaled(feed, scale / 2), names) for feed in first.inputs]
                yield FeedGroup(inputs, expected, scale), halved


def _compare(
    reference: ReferenceEngine, group: FeedGroup, got: Rows, rules: Rules, halved: Rows | None = None
) -> Verification:
    """Compare a group's outputs, and keep the inputs that show the verdict."""
    verdict = _compared(reference, group, got, rules, halved)
    return dataclasses.replace(verdict, witness=_witness(verdict, group, got, rules))


def _compared(
    reference: ReferenceEngine, group: FeedGroup, got: Rows, rules: Rules, halved: Rows | None
) -> Verification:
    """Compare the outputs and probes, then the operands of a Concat.

    halved: the reference's values for half of the inputs; an output that depends on them by little is undecided.
    """

    @functools.cache
    def truth() -> Rows | None:
        with contextlib.suppress(BnexportError):
            return reference.exact(group.inputs, rules.names("reference"))
        return None

    compared = _outputs(group, got, rules, halved, truth)
    sizes = tuple(tuple(tuple(value.shape) for value in feed.values()) for feed in group.inputs)
    more: dict[str, Any] = {"samples": len(group.inputs), "input_scale": group.scale, "sizes": sizes}
    verdict = Verification.of(compared, **more)
    # Bounds of the caller's are those of every number. Smaller inputs need not show in each part.
    if rules.bounded or verdict.status == "failed" or halved is not None:
        return verdict
    parts = [part for each in _parts(group, got, rules, truth) for part in each]
    parts += _small_columns(group, got, rules, truth)
    whole = Verification.of([*compared, *parts], **more)
    if whole.status == "failed":
        return whole
    verdict = whole if parts and verdict else dataclasses.replace(verdict, outputs=whole.outputs)
    return dataclasses.replace(verdict, another=_difference_inside(group, got, rules, truth))


def _witness(verdict: Verification, group: FeedGroup, got: Rows, rules: Rules) -> Named:
    """Return the first sample of which an output is outside its bound alone; the first one where none is."""
    samples = zip(group.inputs, group.expected, got, strict=True)
    for inputs, *rows in samples if verdict.status == "failed" else ():
        pairs = zip(rules.outputs, *rows, strict=False)
        if any(
            compare_output(name, [one], [two], rules.working, rules.atol, rules.rtol).failed for name, one, two in pairs
        ):
            return inputs
    return group.inputs[0]


def _difference_inside(group: FeedGroup, got: Rows, rules: Rules, truth: Truth) -> str:
    """Tell which window ends with another value, if no windows behind it make up for that."""
    start = len(rules.outputs) + len(rules.probes)
    here = slice(start, start + len(rules.meetings))
    names = [meeting["text"] for meeting in rules.meetings]

    def columns(rows: Rows) -> Rows:
        return _columns(rules.common(rows))[here]

    def exact() -> Rows | None:
        rows = truth()
        return None if rows is None else columns(rows)

    compared = _hold(names, columns(group.expected), columns(got), [None] * len(names), rules, exact)
    for meeting, each in zip(rules.meetings, compared, strict=True):
        behind = [compared[place] for place in meeting["behind"]]
        if each.failed and not (behind and all(other.passed for other in behind)):
            return f"{meeting['text']}: it {each.reason}"
    return ""


def _outputs(group: FeedGroup, got: Rows, rules: Rules, halved: Rows | None, truth: Truth) -> list[OutputComparison]:
    """Compare the outputs, each with what is in front of it where that was probed, and then the probes."""
    names, probes = list(rules.outputs), rules.probes
    places = {probe["output"]: len(names) + index for index, probe in enumerate(probes)}
    bounding = {probe["output"]: places[probe["output"]] for probe in probes if not probe["selected"]}
    names += [f"{probe['output']} (before {probe['op_type']})" for probe in probes]
    expected, found = (_columns(rules.common(rows)) for rows in (group.expected, got))
    befores = [expected[bounding[name]] if name in bounding else None for name in names]

    def exact() -> Rows | None:
        rows = truth()
        return None if rows is None else _columns(rules.common(rows))

    compared = _hold(names, expected, found, befores, rules, exact)
    start = len(names) + len(rules.meetings)
    selections = iter(zip(expected[start:], found[start:], strict=True))
    for probe in filter(lambda each: each["selected"], probes):
        index, place, indices = names.index(probe["output"]), places[probe["output"]], next(selections)
        if compared[index].failed and compared[place].passed and rules.tail is not None:
            values = Selection(expected[place], *indices, probe["axis"], compared[place])
            tail = rules.tail(probe["selected"][0], probe["output"])
            compared[index] = without_ties(compared[index], found[index], values, tail)
    if halved is None:
        return compared
    # A saturated output hides its inputs; the probe in front of it shows them.
    shown, half = [places.get(name, index) for index, name in enumerate(names)], _columns(rules.common(halved))
    seen = [shows_inputs(compared[i], expected[i], half[i]) for i in shown]
    return [output if sees else as_hidden(output) for output, sees in zip(compared, seen, strict=True)]


def _parts(group: FeedGroup, got: Rows, rules: Rules, truth: Truth) -> Iterator[list[OutputComparison]]:
    """Compare outputs that a Concat makes operand by operand, each with its own bound."""
    stop = len(rules.names("candidate"))
    for parted in rules.parted:
        place, here = rules.outputs.index(parted["output"]), slice(stop, stop + len(parted["values"]))
        stop = here.stop
        if not is_float(group.expected[0][place]):
            continue

        def pieces(rows: Rows, operands: Rows, place: int = place, here: slice = here, parted: Named = parted) -> Rows:
            return _columns([split(parted, row[here], value[place]) for row, value in zip(operands, rows, strict=True)])

        def exact(pieces: Callable[[Rows, Rows], Rows] = pieces) -> Rows | None:
            rows = truth()
            return None if rows is None else pieces(rows, rows)

        fronts = _columns([row[here] for row in group.expected])[len(parted["saturating"]) :]
        befores = [
            front if saturating else None for front, saturating in zip(fronts, parted["saturating"], strict=True)
        ]
        names = [f"{parted['output']} (operand {index} of Concat)" for index in range(len(fronts))]
        yield _hold(names, pieces(group.expected, group.expected), pieces(got, group.expected), befores, rules, exact)


def _small_columns(group: FeedGroup, got: Rows, rules: Rules, truth: Truth) -> Iterator[OutputComparison]:
    """Yield outputs with columns that differ by more than a bound of their own allows, and that are too small for the whole's."""
    saturating = {probe["output"] for probe in rules.probes if not probe["selected"]}
    for place, name in enumerate(rules.outputs):
        expected, values = ([row[place] for row in rows] for rows in (group.expected, got))
        # A bound of another kind than the table's says what errors are allowed, wherever they are.
        if rules.bound(name, dict(zip(rules.outputs, group.expected[0], strict=False)))[0] is not None:
            continue
        if name in saturating or not all(is_float(one) and one.ndim > 1 and is_finite([one]) for one in expected):
            continue
        for axis in sorted({1, expected[0].ndim - 1}):
            factors = _factors(expected, axis)
            if factors is None:
                continue

            def grown(column: list[Any], factors: np.ndarray = factors) -> list[np.ndarray]:
                return [value.astype(np.float64) * factors for value in column]

            table = tolerances.model(
                coarser(rules.working, str(expected[0].dtype)), np.concatenate(list(map(np.ravel, grown(expected))))
            )
            bound = Tolerance(0.0, _MARGIN * table.atol)
            label = f"{name} (its columns of axis {axis}, each by its own size)"
            found = compare_output(label, grown(expected), grown(values), rules.working, table=bound)
            exact = truth() if found.failed else None
            if exact is None:
                continue
            found = compare_with_truth(found, grown(expected), grown(values), grown([row[place] for row in exact]))
            if found.failed:
                yield found


def _factors(values: list[Any], axis: int) -> np.ndarray | None:
    """Return what makes small columns as large as the largest one; None where none is small."""
    if len({value.shape[axis] for value in values}) != 1 or any(not value.size for value in values):
        return None
    others = tuple(place for place in range(values[0].ndim) if place != axis)
    sizes = np.max([np.abs(value.astype(np.float64)).max(axis=others) for value in values], axis=0)
    small = (sizes > 0) & (sizes < _SMALL * sizes.max())
    if not small.any():
        return None
    shape = [-1 if place == axis else 1 for place in range(values[0].ndim)]
    return np.where(small, sizes.max() / np.where(small, sizes, 1.0), 1.0).reshape(shape)


def _hold(
    names: Sequence[str],
    expected: Rows,
    got: Rows,
    befores: Sequence[Any],
    rules: Rules,
    truth: Truth,
) -> list[OutputComparison]:
    """Compare values by name, a column of all samples each; what the bounds refuse is held against the truth."""
    references = {name: column[0] for name, column in zip(names, expected)}
    bounds = [rules.bound(name, references) for name in names]
    compared = [
        compare_output(name, one, other, rules.working, rules.atol, rules.rtol, before, table)
        for name, one, other, before, (table, _) in zip(names, expected, got, befores, bounds)
    ]
    if rules.bounded or not any(output.failed and 0 < output.max_abs_diff < np.inf for output in compared):
        return compared
    exact = truth()
    if exact is None:
        return compared
    return [
        compare_with_truth(output, one, other, true, scale) if output.failed else output
        for output, one, other, true, (_, scale) in zip(compared, expected, got, exact, bounds)
    ]


def _columns(rows: Rows) -> Rows:
    """Return the samples of each value, from the values of each sample."""
    return [list(column) for column in zip(*rows, strict=True)]
