"""BatchNormFolder, the folder as a pass of onnx-ir that composes with the passes of onnx-ir and onnxscript.

requires: names of operators keep their standard meaning, and certain sizes do not contradict one another.
ensures: graph inputs and outputs keep their names, order and types; nodes that are no part of a site stay; every
site is in the report with its rule or its reasons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import onnx_ir as ir

from bnexport.folding.context import Leftover, Options, check_leftover
from bnexport.folding.reading.contradictions import refuse_contradictions
from bnexport.folding.reporting.counts import count
from bnexport.folding.reporting.report import FoldReport
from bnexport.folding.rules import check_rules
from bnexport.folding.selection import as_names, check_selection
from bnexport.folding.steps import Folding, refuse_redefined_operators
from bnexport.graph.mixed_types import insert_casts


@dataclasses.dataclass
class FolderResult(ir.passes.PassResult):
    """Result of the pass: the model, whether it changed, and the report."""

    report: FoldReport


class BatchNormFolder(ir.passes.InPlacePass):
    """Pass that converts sync batch norm and folds batch norms into their neighbours, in place, without
    verification.

    `bnexport.fold` runs the same steps on a copy and compares the result with the original.

    Args:
        max_scale, only, skip, training_to_inference, rules, leftover: as `bnexport.fold` takes them.

    Raises (when it is called):
        UsageError: `only` or `skip` names no batch norm.
        onnx_ir.passes.PreconditionError: the model redefines a standard operator, or its sizes contradict.

    Examples:
        >>> import onnx_ir as ir
        >>> from onnx_ir.passes.common import RemoveUnusedNodesPass
        >>> model = ir.from_onnx_text('''
        ...     <ir_version: 9, opset_import: ["" : 17]>
        ...     net (float[N, 1] x) => (float[N, 2] y)
        ...     <float[1, 2] w = {1, 2}, float[2] gamma = {3, 3}, float[2] beta = {1, 1},
        ...      float[2] mean = {0, 0}, float[2] var = {0.25, 1}>
        ...     {
        ...         h = MatMul(x, w)
        ...         y = BatchNormalization <epsilon = 0.0> (h, gamma, beta, mean, var)
        ...     }
        ... ''')
        >>> result = ir.passes.Sequential(BatchNormFolder(), RemoveUnusedNodesPass())(model)
        >>> result.modified, [node.op_type for node in result.model.graph]
        (True, ['MatMul', 'Add'])
    """

    def __init__(
        self,
        *,
        max_scale: float = 1e6,
        only: Iterable[str] | None = None,
        skip: Iterable[str] = (),
        training_to_inference: bool = False,
        rules: Iterable[str] | None = None,
        leftover: Leftover = "batch-norm",
    ) -> None:
        self.options = Options(
            max_scale=max_scale,
            only=None if only is None else as_names("only", only),
            skip=as_names("skip", skip),
            training_to_inference=training_to_inference,
            rules=None if rules is None else check_rules(rules),
            leftover=check_leftover(leftover),
        )

    def requires(self, model: ir.Model) -> None:
        refuse_redefined_operators(model)
        refuse_contradictions(model)

    def call(self, model: ir.Model) -> FolderResult:
        check_selection(model, only=self.options.only or (), skip=self.options.skip)
        before = count(model)
        folding = Folding(model, self.options)
        folding.convert()
        folding.fold()
        if folding.converted:
            insert_casts(model)
        report = FoldReport(
            tuple(folding.sites),
            before,
            count(model),
            folding.meaning_changed,
            notes=folding.notes,
            inlined=folding.inlined,
        )
        return FolderResult(model, report.changed, report)
