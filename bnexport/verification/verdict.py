"""The one verdict of every comparison: of files, exports, folded modules and training steps.

Plain data; it imports nothing of what makes it.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bnexport import pages, schema
from bnexport.errors import NotVerifiedWarning, UsageError

if TYPE_CHECKING:
    from rich.table import Table

# Settings of a comparison of two models, as plain data.

Inputs = Mapping[str, np.ndarray] | Sequence[Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Terms:
    """Settings of a comparison: the inputs or how to draw them, the caller's bounds, and a time limit.

    beside: whether to draw random inputs as well as those that are given. timeout: seconds for all of it. patience: seconds
    for the float64 run that an ill-conditioned model needs. providers: of the candidate's session. proof_seconds: of processor
    time for the local proof; None for what the model's size allows. save_inputs: a folder for what shows the verdict.
    """

    inputs: Inputs | None = None
    seed: int = 0
    samples: int = 2
    atol: float | None = None
    rtol: float | None = None
    timeout: float | None = None
    patience: float = 30.0
    providers: tuple[str, ...] = ()
    proof_seconds: float | None = None
    beside: bool = False
    save_inputs: str = ""


# A note on the verdict of a quantised model.
AS_WRITTEN = (
    "compared without ONNX Runtime's optimisations, which make integer arithmetic of QuantizeLinear and DequantizeLinear around an"
    " operator: by default its results may be some steps of the quantisation away (ORT_DISABLE_ALL runs the file as it is written)"
)

Status = Literal["passed", "failed", "not_verified"]
Mark = Literal["proved", "compared", "not_run", "failed"]
Method = Literal["whole", "local", "both"]
# Share of a bound below which outputs are equal but for the rounding of a fold, and of the largest coefficient below which
# outputs may hide an error of another one: of a sum of 2,500 terms it is 2e-6, which is that share of the bound in float32.
_LAST_BITS, _SLIGHT = 1 / 32, 1e-4
# Outcomes of sites whose values may differ.
CHANGED = ("folded", "merged", "restated")
# The shape of each input of one run.
Shapes = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class OutputComparison:
    """One output over all samples. max_abs_diff, atol: of the sample that is nearest to its bound. max_rel_diff: the largest
    difference over the largest finite reference value.

    decided: False where the reference's values, as `reason` says, can show neither equality nor a difference.

    bound: where atol and rtol are from: "table", "caller", "float64" where the reference's own rounding error was
    measured (max_abs_diff and max_rel_diff then are those from the model in float64), "ties" where indices differ as
    rounding explains it, or "norm" where differences are 2-norms, as those of a training step's gradients. engine: what
    ran the candidate, where several did.
    """

    name: str
    dtype: str
    elements: int
    max_abs_diff: float
    max_rel_diff: float
    atol: float
    rtol: float
    passed: bool
    reason: str = ""
    bound: str = "table"
    decided: bool = True
    engine: str = ""

    @property
    def failed(self) -> bool:
        """The output differs by more than its bound."""
        return self.decided and not self.passed

    def summary(self) -> str:
        """Return the comparison in one line."""
        relative = f" + {self.rtol:.3g} * |value|" if self.rtol else ""
        text = self.reason or f"differs by {self.max_abs_diff:.3g}, allowed {self.atol:.3g}{relative}"
        return f"output {self.name!r}{f' in {self.engine}' if self.engine else ''}: {text}"

    def nearness(self) -> tuple[bool, bool, bool, float]:
        """Return a key to sort by: failures last, then undecided, then beyond the table, then by the share of the bound."""
        bound = self.atol or self.rtol
        difference = self.max_abs_diff if self.atol else self.max_rel_diff
        # A bound of 0 is that of integers.
        share = difference / bound if bound else math.inf if difference else 0.0
        return self.failed, not self.decided, self.bound in ("float64", "ties"), share


def nearest(outputs: Sequence[OutputComparison]) -> list[OutputComparison]:
    """Return, for each output in each engine, the comparison nearest to its bound, with the elements of all."""
    found: dict[tuple[str, str], list[OutputComparison]] = {}
    for output in outputs:
        found.setdefault((output.name, output.engine), []).append(output)
    return [
        dataclasses.replace(max(each, key=OutputComparison.nearness), elements=sum(output.elements for output in each))
        for each in found.values()
    ]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A change that a report tells of. scope: the graph, as the report names it. nodes: names of the original's nodes
    whose outputs may differ: the site, its targets and what lies between. site: the name of the site."""

    site: str
    scope: str
    nodes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SiteProof:
    """The local proof of one fold.

    method: "proved" (the region is affine, or a lemma covers what is not, and its whole map was compared), "compared" (on
    random points), "failed" or "not_run", as `reason` says. error, bound: the largest difference of a coefficient and the
    largest that the rounding of the stored weights allows, both relative to the largest coefficient; 0 where something
    else than a coefficient differs.
    """

    site: str
    method: Mark
    error: float = 0.0
    bound: float = 0.0
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class WindowEnd:
    """A value of both models at which a part ends that no lemma proves. text: what became what.

    behind: the places, among all ends, of those whose parts alone read it: they may make up for what differs here.
    """

    reference: str
    candidate: str
    text: str
    behind: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Verification:
    """The verdict on a candidate: whether it computes what its reference does.

    status: "passed"; "failed"; or "not_verified" where nothing could be compared, or decided. `reason` says why it is
    not "passed", why the reference is "converted", or which names were matched by position. True in a condition only where it passed.

    outputs: each output's comparison; where there are several engines or inputs, the one nearest to its bound.
    engine: what ran the models. reference: "original", or "converted" where the original cannot run here, or is a
    training graph, and was compared after its sync batch norms had been converted. samples, seed: sets of random inputs
    and the seed of the first. input_scale: what the float inputs were multiplied by; below 1 where the outputs for the
    first inputs decide nothing. sizes: the shapes of the inputs of each run, the example's first.

    method: "whole" where the models ran, "local" where each change was proved where it stands and the rest is the same,
    "both". sites: the local proof, one for each fold, in the order of the report.

    another: how the models differ though they correspond node by node: in a constant or an attribute, by more than rounding,
    or in values that other operators make. ends: of the parts that are not proved, where a run compares them.

    place: where a difference starts, as far as values of both models tell; empty where nothing failed. witness: the inputs,
    by name, of the run that failed; of the first one where none did. It is not in the JSON.

    certificate: of the candidate: "used" where the proof took its regions from it, "not used: " and why where it was there
    and the folds were searched for; empty where there was none, or nothing was proved.
    """

    status: Status
    reason: str = ""
    outputs: tuple[OutputComparison, ...] = ()
    engine: str = ""
    reference: str = "original"
    samples: int = 0
    seed: int = 0
    input_scale: float = 1.0
    sizes: tuple[Shapes, ...] = ()
    method: Method = "whole"
    sites: tuple[SiteProof, ...] = ()
    certificate: str = ""
    another: str = ""
    ends: tuple[WindowEnd, ...] = ()
    place: str = ""
    witness: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def skipped(cls, reason: str) -> Verification:
        """Nothing was compared."""
        return cls("not_verified", reason)

    @classmethod
    def of(cls, outputs: Sequence[OutputComparison], **others: Any) -> Verification:
        """Make the verdict on all outputs; the reason is that of the first that failed, or else is undecided."""
        wrong = next((output for output in outputs if output.failed), None)
        wrong = wrong or next((output for output in outputs if not output.decided), None)
        if wrong is None:
            return cls("passed", outputs=tuple(outputs), **others)
        others["reason"] = f"output {wrong.name!r}: {wrong.reason}"
        return cls("failed" if wrong.failed else "not_verified", outputs=tuple(outputs), **others)

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        reason = textwrap.shorten(f": {self.reason}" if self.reason else "", 120, placeholder=" ...")
        count = len(self.outputs)
        return f"Verification({self.status}{reason}; {count} output{'s' * (count != 1)}, {self.proved})"

    @property
    def passed(self) -> bool:
        """Every output was compared and lies within its bound."""
        return self.status == "passed"

    @property
    def ran(self) -> bool:
        """Whether the candidate ran: False where it has failed before any output was compared."""
        return self.status != "failed" or bool(self.outputs)

    @property
    def max_abs_diff(self) -> float:
        """The largest absolute difference over all outputs; 0 when none was compared."""
        return max((output.max_abs_diff for output in self.outputs), default=0.0)

    @property
    def max_rel_diff(self) -> float:
        """The largest relative difference over all outputs; 0 when none was compared."""
        return max((output.max_rel_diff for output in self.outputs), default=0.0)

    def summary(self, *, folds: bool = True) -> str:
        """Return the verdict in one line: the output nearest to its bound, under which conditions, and how many folds were
        proved and compared.

        folds: False leaves these out, where nothing can have been folded.
        """
        text = self._compared()
        return f"{text}; {self.proved}" if folds and text else text or self.proved

    def line(self, *, folds: bool = True) -> str:
        """Return the summary behind the status, as every command prints it."""
        text = self.summary(folds=folds)
        return text if self.status == "not_verified" else f"verification {self.status}: {text}"

    def tables(self, title: str = "") -> list[Table]:
        """Return a table of the outputs that were compared, if there are any."""
        rows = [
            (
                output.name,
                output.dtype,
                f"{output.max_abs_diff:.3g}",
                f"{output.max_rel_diff:.3g}",
                f"{output.atol:.3g}" + (f" + {output.rtol:.3g} |y|" if output.rtol else ""),
                "ok" if output.passed else f"{'differs' if output.decided else 'undecided'}: {output.reason}",
            )
            for output in self.outputs
        ]
        columns = ("output", "type", "largest difference", "relative", "allowed", "")
        return [pages.table(title, columns, rows, right=columns[2:4])] if rows else []

    def _repr_html_(self) -> str:
        return pages.fragment([self.line()], self.tables())

    def _compared(self) -> str:
        """Return the verdict on outputs, or its reason; empty where nothing but folds was looked at."""
        if self.status == "not_verified":
            return f"not verified: {self.reason}"
        if self.method == "local" and self.passed:
            return ""
        if not self.outputs or (self.method == "local" and self.reason):
            return self.reason or "there is nothing to compare"
        nearest = max(self.outputs, key=OutputComparison.nearness)
        text = nearest.summary()
        if self.engine and not nearest.engine:
            text += f", in {self.engine}"
        sizes = list(dict.fromkeys(self.sizes))
        if sizes:
            text += f", at {f'{len(sizes)} sizes: ' if len(sizes) > 1 else ''}{', '.join(map(_size, sizes))}"
        if self.input_scale != 1.0:
            text += f", on inputs times {self.input_scale:.3g}"
        if self.reference == "original" and self.passed and self.reason:
            text += f"; {self.reason}"
        if self.reference == "converted" and self.passed:
            text += "; compared with the converted model"
            text += f", since the model itself cannot run here: {self.reason}" if self.reason else ""
        return text

    @property
    def proved(self) -> str:
        """The numbers of folds that were proved, compared only, refuted and not checked, in words."""
        marks = [proof.method for proof in self.sites]
        covered = self.passed and self.method != "local"
        proved, failed = marks.count("proved"), marks.count("failed")
        compared = marks.count("compared") + (marks.count("not_run") if covered else 0)
        text = f"{proved:,} fold{'' if proved == 1 else 's'} proved, {compared:,} compared only"
        if failed:
            text += f", {failed:,} refuted"
        if proved + compared + failed < len(marks):
            text += f", {len(marks) - proved - compared - failed:,} not checked"
        bound = max((proof.bound for proof in self.sites), default=0.0)
        return f"{text}, errors within {bound:.2g} of the largest weight" if bound else text

    def joined(self, whole: Verification) -> Verification:
        """Join this local proof with a run of the whole models.

        What either refutes has failed. But a part that differs may reach no output: behind a mask, in a branch that is never
        taken, at numbers that never arrive there. So where it differs by what outputs would show, and they are equal but for
        their last bits, nothing is verified. Another model is not verified by a run, which shows what its inputs reach. Where
        nothing ran, or the outputs decide nothing, folds that are all proved are right; one that was only compared, at
        random points, is not verified.
        """
        if self.status == "failed" and whole.passed and self._would_show() and not whole._shows_a_difference():
            reason = f"{self.reason}; no output shows it"
            whole = dataclasses.replace(whole, status="not_verified", reason=reason)
        elif self.status == "failed" or whole.status == "failed":
            first = self if self.status == "failed" else whole
            whole = dataclasses.replace(whole, status="failed", reason=first.reason)
        another = self.another or whole.another
        if another and whole.passed:
            text = f'another model, whose outputs agree (method="whole" compares these alone): {another}'
            whole = dataclasses.replace(whole, status="not_verified", reason=text)
        proved = self.passed and all(proof.method == "proved" for proof in self.sites)
        if proved and whole.status == "not_verified":
            return dataclasses.replace(self, outputs=whole.outputs)
        known = {"sites": self.sites, "certificate": self.certificate, "another": another}
        return dataclasses.replace(whole, method="both", **known)  # type: ignore[arg-type]

    def _would_show(self) -> bool:
        """Whether each refuted fold differs in more than coefficients that are slightly off."""
        return not any(proof.method == "failed" and 0 < proof.error < _SLIGHT for proof in self.sites)

    def _shows_a_difference(self) -> bool:
        """Whether an output differs by more than its last bits, by a bound that is not the reference's own error."""
        told = (output for output in self.outputs if output.bound in ("table", "caller"))
        return any(output.nearness()[-1] > _LAST_BITS for output in told)

    def with_folds_of(self, proof: Verification | None) -> Verification:
        """Return the verdict on a model with the marks of the folds that were made in it."""
        return self if proof is None else dataclasses.replace(self, sites=proof.sites)

    def warn(self, kept: str, *, stacklevel: int) -> None:
        """Warn that `kept`, a file, is there and not verified; nothing where it was, or failed."""
        if self.status == "not_verified":
            text = f"{kept} is kept and not verified: {self.reason}"
            warnings.warn(NotVerifiedWarning(text), stacklevel=stacklevel + 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as the command line prints it with --json."""
        fields = dataclasses.asdict(self)
        del fields["ends"], fields["witness"]
        return {"schema_version": schema.REPORT_VERSION, "passed": self.passed, **fields}


def as_method(verify: bool | str) -> Method | None:
    """Return the method that an argument `verify` stands for; None for no verification. Raises UsageError."""
    if isinstance(verify, bool):
        return "both" if verify else None
    for method in ("local", "whole", "both"):
        if verify == method:
            return method
    raise UsageError(f'verify: got {verify!r}, expected True, False, "local", "whole" or "both"')


def _size(shapes: Shapes) -> str:
    return " + ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)
