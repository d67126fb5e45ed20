"""Prove the folds of a torch module where they stand, as those of a file: both forwards become graphs of operators.

Nothing is shared with the folding of modules: the graphs come from `modules.module_graph`, the algebra from `proof`. A fold inside
a submodule whose code torch.fx cannot trace is proved in the part that holds it, if that is traced alone; how the code
around it uses the part is what whole modules show.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from bnexport import tolerances
from bnexport.errors import UnsupportedModelError, first_line
from bnexport.modules.module_graph import ModuleGraph, as_array, shapes_of
from bnexport.modules.tensors import Array, in_double, to_array
from bnexport.runtime.engine import EngineFailure, failures
from bnexport.sync_bn.convert import replace, to_plain
from bnexport.torch_versions import pytree
from bnexport.verification.inputs import FeedGroup
from bnexport.verification.judge import Rules, judge
from bnexport.verification.proof.regions import MAIN
from bnexport.verification.proof.search import ENGINE, prove
from bnexport.verification.verdict import Claim, SiteProof, Verification

# A folded module against the original, both in torch, on the caller's inputs.


def compare(original: nn.Module, folded: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Verification:
    """Runs both, which are in eval mode and may change by it, and compares every output tensor.

    The bound is that of `bnexport.tolerances.model`, in the coarsest float type of any parameter or input. An original
    that cannot run here is replaced by its copy with torch's batch norms, unfolded.
    """
    feed = {str(index): value for index, value in enumerate(inputs)}
    label, reference = "original", _ModuleEngine(original)
    try:
        names, expected = reference.named(feed)
    except EngineFailure:  # some packages' batch norms run on GPUs only
        label, reference = "converted", _ModuleEngine(replace(original, to_plain))
        names, expected = reference.named(feed)
    again = reference.run(feed, names)
    if any(one.tobytes() != two.tobytes() for one, two in zip(expected, again)):
        return Verification.skipped("the model draws random numbers")
    try:
        rules = Rules(names, _working_type(original, inputs))
        verdict = judge(reference, _ModuleEngine(folded), [FeedGroup([feed], [expected])], rules)
    except EngineFailure as failure:  # where it misses its batch norms
        verdict = Verification("failed", f"the folded module fails: {failure.detail}")
    except UnsupportedModelError as error:
        verdict = Verification("failed", str(error))
    return dataclasses.replace(verdict, reference=label, engine=f"torch {torch.__version__}")


class _ModuleEngine:
    """A module whose outputs have the names of their places."""

    name = "torch"

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def named(self, feeds: Mapping[str, torch.Tensor]) -> tuple[list[str], list[Any]]:
        """Return the places of the output tensors, and their values. Raises EngineFailure."""
        with failures(self.name, "run"), torch.no_grad():
            # Code that works in place may change its inputs.
            leaves = pytree.tree_flatten_with_path(self._module(*(value.clone() for value in feeds.values())))[0]
        tensors = [(path, value) for path, value in leaves if isinstance(value, torch.Tensor)]
        return [f"output{pytree.keystr(path)}" for path, _ in tensors], [to_array(value) for _, value in tensors]

    def run(self, feeds: Mapping[str, torch.Tensor], outputs: Sequence[str]) -> list[Array]:
        names, values = self.named(feeds)
        if names != list(outputs):
            raise UnsupportedModelError(f"the outputs differ: {list(outputs)[:8]} and {names[:8]}")
        return values

    def exact(self, feeds: Sequence[Mapping[str, torch.Tensor]], outputs: Sequence[str]) -> list[list[Array]]:
        with failures(self.name, "run"):
            wide = _ModuleEngine(copy.deepcopy(self._module).double())
        return [wide.run(in_double(feed), outputs) for feed in feeds]


def _working_type(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> str:
    """Return the coarsest float type of any parameter or input."""
    used: list[Any] = [tensor.dtype for tensor in (*model.parameters(), *inputs) if tensor.is_floating_point()]
    names = {str(dtype).removeprefix("torch.") for dtype in used} & set(tolerances.UNIT_ROUNDOFF)
    return max(names, key=lambda name: tolerances.UNIT_ROUNDOFF[name], default="float32")


@dataclasses.dataclass(frozen=True)
class ModuleFold:
    """A change to prove. site: its name. paths: of the submodules that are folded, and of those that changed for them."""

    site: str
    paths: tuple[str, ...]


def prove_module(
    original: nn.Module, folded: nn.Module, inputs: tuple[torch.Tensor, ...] | None, folds: Sequence[ModuleFold]
) -> Verification:
    """Prove each fold, and that everything else is the same. Both modules are in eval mode and are not changed.

    inputs: tell the ranks of values; without them a layer that takes any rank may not be provable.
    """
    try:
        return _Proof(original, folded, folds).run(inputs)
    except Exception as error:  # whatever the model's code makes of symbols, or its classes of their tensors
        reason = f"the module cannot be written as a graph: {type(error).__name__}: {first_line(error)[:200]}"
        return Verification("not_verified", reason, engine=ENGINE, method="local")


class _Proof:
    def __init__(self, original: nn.Module, folded: nn.Module, folds: Sequence[ModuleFold]) -> None:
        self._modules = original, folded
        self._folds = folds
        self._changed = frozenset(path for fold in folds for path in fold.paths)
        self._marks: dict[ModuleFold, SiteProof] = {}

    def run(self, inputs: tuple[torch.Tensor, ...] | None) -> Verification:
        """Return the verdict; its sites are in the order of the folds."""
        count = _input_count(self._modules[0]) if inputs is None else len(inputs)
        try:
            shapes = {} if inputs is None else _shapes(self._modules[0], inputs)
            failure = self._part("", count, shapes, self._folds)
        except UnsupportedModelError as error:
            failure = self._rest()
            reason = str(error)
        else:
            reason = "it is inside code that torch.fx cannot trace"
        for fold in self._folds:
            if fold not in self._marks and not failure:
                failure = self._inside(fold)
        sites = tuple(self._marks.get(fold, SiteProof(fold.site, "not_run", reason=reason)) for fold in self._folds)
        left = next((proof for proof in sites if proof.method == "not_run"), None)
        if failure:
            return Verification("failed", failure, engine=ENGINE, sites=sites, method="local")
        if left is not None:
            text = f"site {left.site}: {left.reason}"
            return Verification("not_verified", text, engine=ENGINE, sites=sites, method="local")
        return Verification("passed", engine=ENGINE, sites=sites, method="local")

    def _inside(self, fold: ModuleFold) -> str:
        """Prove a fold in the smallest submodule around it that is traced alone; why it is wrong, if it is."""
        parts = [path.split(".") for path in fold.paths]
        common = 0
        while all(len(each) > common + 1 and each[common] == parts[0][common] for each in parts):
            common += 1
        for length in range(common, 0, -1):
            try:
                failure = self._part(".".join(parts[0][:length]), 1, {}, [fold])
            except UnsupportedModelError:
                continue
            if failure or fold in self._marks:
                return failure
        return ""

    def _part(self, path: str, count: int, shapes: dict[str, tuple[int, ...]], folds: Sequence[ModuleFold]) -> str:
        """Prove the folds of a submodule that lie in its trace; why it is wrong, if it is. Raises UnsupportedModelError."""
        start = f"{path}." if path else ""
        changed = frozenset(each.removeprefix(start) for each in self._changed if each.startswith(start))
        one, two = (ModuleGraph(module.get_submodule(path), count, shapes, changed) for module in self._modules)
        claims: dict[ModuleFold, Claim] = {}
        for fold in self._folds:
            inner = [each.removeprefix(start) for each in fold.paths if each.startswith(start)]
            nodes = [node for each in inner for node in one.nodes.get(each, ())]
            if nodes and len(inner) == len(fold.paths) and all(each in one.nodes for each in inner):
                claims[fold] = Claim(fold.site, MAIN, tuple(str(node.name) for node in _between(nodes)))
        verdict = prove(one.model, two.model, list(claims.values()))
        for fold, proof in zip(claims, verdict.sites, strict=False):
            if fold in folds:
                self._marks[fold] = proof
        return verdict.reason if verdict.status == "failed" else ""

    def _rest(self) -> str:
        """Tell what differs outside the folds of a module that cannot be traced: classes and tensors by their paths."""
        mine, theirs = (dict(module.named_modules()) for module in self._modules)
        if mine.keys() != theirs.keys():
            return "the submodules changed"
        for path, one in mine.items():
            two = theirs[path]
            if path in self._changed:
                continue
            if type(one) is not type(two):
                return f"{path} became a {type(two).__name__}, and belongs to no fold"
            for name in {*one._parameters, *one._buffers, *two._parameters, *two._buffers}:
                pair = [each._parameters.get(name, each._buffers.get(name)) for each in (one, two)]
                if (pair[0] is None) != (pair[1] is None):
                    return f"{path}.{name} changed and belongs to no fold"
                if pair[0] is not None and pair[1] is not None and not _same(pair[0], pair[1]):
                    return f"{path}.{name} changed and belongs to no fold"
        return ""


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one is two or (one.dtype == two.dtype and as_array(one).tobytes() == as_array(two).tobytes())


def _between(nodes: list[ir.Node]) -> list[ir.Node]:
    """Return these nodes, the node where they meet, and all on a path from one of them to another."""
    below = {node: _reached([node]) for node in nodes}
    last = [node for node in nodes if not any(other in below[node] for other in nodes)]
    if len(last) > 1:
        common = [node for node in below[last[0]] if all(node in below[other] for other in last[1:])]
        # The first of them leads to all others.
        nodes = [*nodes, *(node for node in common if len(_reached([node])) == len(common) - 1)]
    above: set[ir.Node] = set()
    pending = list(nodes)
    while pending:
        for value in pending.pop().inputs:
            node = None if value is None else value.producer()
            if node is not None and node not in above:
                above.add(node)
                pending.append(node)
    return list(dict.fromkeys([*nodes, *(node for node in _reached(nodes) if node in above)]))


def _reached(nodes: list[ir.Node]) -> dict[ir.Node, None]:
    """Return all nodes that depend on these."""
    found: dict[ir.Node, None] = {}
    pending = list(nodes)
    while pending:
        for output in pending.pop().outputs:
            for use in output.uses():
                if use.node not in found:
                    found[use.node] = None
                    pending.append(use.node)
    return found


def _shapes(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, tuple[int, ...]]:
    try:
        return shapes_of(model, inputs)
    except Exception:  # what the model's code raises outside its own class
        return {}


def _input_count(model: nn.Module) -> int:
    """Count the parameters of a forward without a default."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in kinds and each.default is each.empty for each in parameters)
