"""Fold the graph of a torch module or program: only parameters of its layers change, and batch norms go.

The code of a module stays, and with it every operation that is no module. Of merged branches one module becomes the
convolution that is their sum. A module may be called several times; then its calls have to fold alike.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from bnexport.folding.context import Layers, Options
from bnexport.folding.folder import Folding
from bnexport.folding.report import Refusal, SiteReport
from bnexport.folding.rules.parallel import NAME as PARALLEL
from bnexport.graph.nodes import Refused, input_at, is_standard
from bnexport.modules.module_graph import ModuleGraph
from bnexport.modules.module_trace import Memory, Trace, is_layer
from bnexport.sync_bn.recognition import has_hooks
from bnexport.torch_versions import PLAIN_TENSORS, BatchNormBase

SLOTS = ("weight", "bias")


@dataclasses.dataclass(frozen=True)
class Merge:
    """Branches of one sum that are one convolution now.

    node: the convolution in the folded graph. parts, sums: the nodes of modules, and of code, in the source's graph. carrier:
    the part that becomes the convolution; others that read the branches' input become zeros, the rest identities.
    """

    node: ir.Node
    parts: tuple[ir.Node, ...]
    sums: tuple[ir.Node, ...]
    carrier: ir.Node

    @property
    def sign(self) -> float:
        """The sign with which the code adds the carrier."""
        sign, node = 1.0, self.carrier
        while (uses := list(node.outputs[0].uses())) and uses[0].node in (*self.parts, *self.sums):
            node = uses[0].node
            sign *= -1.0 if node.op_type == "Sub" and uses[0].idx == 1 else 1.0
        return sign


class LayerFolder:
    """Folds the graph of a module or program. modules, refused: by path; the reasons why some of them stay.

    `run` sets model, the folded graph; after, its nodes by name; merges, what became of merged branches; and sites, the
    reports.
    """

    model: ir.Model
    after: dict[str, ir.Node]
    merges: list[Merge]
    sites: list[SiteReport]

    def __init__(
        self,
        trace: Trace,
        graph: ModuleGraph,
        modules: Mapping[str, nn.Module],
        refused: Mapping[str, Refused],
        options: Options,
    ) -> None:
        self._graph, self._modules, self._options = graph, modules, options
        self._paths = {str(node.name): path for path, nodes in graph.calls.items() for node in nodes}
        self._source = {str(node.name): node for node in graph.model.graph}
        self._unused = {path: reason for path, reason in refused.items() if path not in graph.calls}
        self._refused = self._unused | {
            str(node.name): refused[path] for path in refused for node in graph.calls.get(path, ())
        }
        memory = Memory(trace, norms=True)
        writers = [node for node in trace.graph.nodes if memory.changed(node) and not memory.is_clean(node)]
        touched = {value for node in writers for value in memory.changed(node)}
        self._entangled = frozenset(trace.paths[node] for node in touched if node in trace.paths)
        self._apart: set[str] = set()

    def run(self) -> None:
        """Fold until the calls of each module agree."""
        while True:
            self.model = self._graph.model.clone()
            folding = Folding(self.model, self._folder_options())
            folding.fold()
            self.after = {str(node.name): node for node in self.model.graph}
            merges = self._find_merges(folding)
            if merges is not None and not self._refuse_calls(folding.sites):
                break
        self.merges, self.sites = merges, self._reports(folding.sites)

    def gone(self) -> list[str]:
        """Return the paths of the batch norms that are no operator any more."""
        return [path for path, calls in self._graph.calls.items() if calls[0].name not in self.after]

    def changed(self) -> Iterator[tuple[str, str, np.ndarray]]:
        """Yield path, name and new value of each parameter that changed, those of merged branches aside."""
        merged = {part for merge in self.merges for part in merge.parts}
        for path, (call, *_) in self._graph.calls.items():
            if call in merged or call.name not in self.after or not is_layer(self._modules[path]):
                continue
            for slot, old, new in zip(
                SLOTS, *(read_state(str(call.name), each) for each in (self._source, self.after))
            ):
                if new is not None and (old is None or new.const_value is not old.const_value):
                    array = new.const_value.numpy()
                    yield path, slot, array.T if slot == "weight" and call.op_type == "MatMul" else array

    def _folder_options(self) -> Options:
        layers = [name for name, path in self._paths.items() if is_layer(self._modules[path])]
        single = (nodes[0] for nodes in self._graph.calls.values() if len(nodes) == 1)
        mergeable = ("Conv", "BatchNormalization", "AveragePool", "Pad", "Identity")
        replaceable = {str(node.name) for node in single if is_standard(node, *mergeable)}
        hooked = {name for name in replaceable if has_hooks(self._modules[self._paths[name]])}
        padded = {name for name in replaceable if f"{name}.pad" in self._source}
        free = [name for name in layers if name not in self._refused]
        entangled = frozenset(name for name, path in self._paths.items() if path in self._entangled)
        return dataclasses.replace(
            self._options,
            only=None if self._options.only is None else self._names(self._options.only),
            skip=self._names(self._options.skip),
            layers=Layers(
                frozenset((*free, *(f"{name}.bias" for name in free))),
                self._refused,
                frozenset(replaceable - hooked - padded - self._apart - self._refused.keys()),
                entangled,
            ),
        )

    def _names(self, paths: Iterable[str]) -> frozenset[str]:
        """Return these, with the names of all calls."""
        return frozenset((*paths, *(str(node.name) for path in paths for node in self._graph.calls.get(path, ()))))

    def _refuse_calls(self, sites: Sequence[SiteReport]) -> bool:
        """Refuse the batch norms that call for different changes of a module's calls; return whether there were any."""
        found: dict[str, Refused] = {}
        alike = True
        for path, calls in self._graph.calls.items():
            names = [str(call.name) for call in calls]
            states = [read_state(name, self.after) for name in names]
            if all(_is_same(state, states[0]) for state in states):
                continue
            alike = False
            reason = Refused("called-elsewhere", f"{path} is called {len(calls)} times, and not all calls fold alike")
            targets = {*names, *(f"{name}.bias" for name in names)}
            for site in sites:
                if site.changed and not targets.isdisjoint((*site.nodes, *site.targets)):
                    own = {self._paths[name] for name in site.nodes if name in self._paths}
                    found.update((str(node.name), reason) for each in own for node in self._graph.calls[each])
        self._refused.update(found)
        assert alike or found, "a module's calls differ, and no fold is the cause"
        return not alike

    def _find_merges(self, folding: Folding) -> list[Merge] | None:
        """Return what became of merged branches; None where the code allows one of them for no module."""
        found: list[Merge] = []
        for site in folding.sites:
            if site.rules != (PARALLEL,) or not site.changed:
                continue
            sums = tuple(self._source[name] for name in site.nodes if name not in self._paths)
            choices: list[list[Merge]] = []
            for node, names in folding.merged.items():
                if not names.isdisjoint(site.nodes):
                    parts = tuple(each for name, each in self._source.items() if name in names and name in self._paths)
                    choices.append([Merge(node, parts, sums, head) for head in find_heads(parts)])
            chosen = next((each for each in itertools.product(*choices) if self._runs(each, sums)), None)
            if chosen is None:
                self._apart.update(site.nodes)
                return None
            found += chosen
        return found

    def _runs(self, merges: Sequence[Merge], sums: Sequence[ir.Node]) -> bool:
        """Whether the code adds nothing in place to a zero without dimensions."""
        carriers = {merge.carrier for merge in merges}
        parts = {part for merge in merges for part in merge.parts}
        heads = {head for merge in merges for head in find_heads(merge.parts)}

        def is_scalar(value: ir.Value | None) -> bool:
            assert value is not None
            node = value.producer()
            if node in heads:
                return node not in carriers
            if node is not None and (node in sums or node in parts):
                return all(map(is_scalar, node.inputs if node in sums else node.inputs[:1]))
            # A number in the code is one, too.
            return value.const_value is not None

        in_place = (node for node in sums if str(node.name) in self._graph.in_place)
        return all(not is_scalar(node.inputs[0]) or is_scalar(node.outputs[0]) for node in in_place)

    def _reports(self, sites: Sequence[SiteReport]) -> list[SiteReport]:
        """Return one report for each batch norm and each merge, with the paths of modules."""
        found: dict[tuple[str, ...], SiteReport] = {}
        for site in sites:
            paths = dict.fromkeys(self._path(name) for name in site.nodes)
            own = tuple(sorted(paths, key=lambda path: not isinstance(self._modules.get(path), BatchNormBase)))
            # Another call of the same batch norm may be there.
            others = [found[own]] if own in found else []
            every = [*others, dataclasses.replace(site, region=site.region or site.nodes)]
            found[own] = dataclasses.replace(
                site,
                nodes=own,
                targets=tuple(dict.fromkeys(self._path(name) for each in every for name in each.targets)),
                refusals=tuple(dict.fromkeys(refusal for each in every for refusal in each.refusals)),
                region=tuple(dict.fromkeys(name for each in every for name in each.region)),
            )
        for path, reason in self._unused.items():
            module = self._modules[path]
            if isinstance(module, BatchNormBase):
                refusal = Refusal("batch_norm", path, reason.code, reason.text)
                found[path,] = SiteReport((path,), type(module).__name__, "", "kept", refusals=(refusal,))
        return list(found.values())

    def _path(self, name: str) -> str:
        return self._paths.get(name.removesuffix(".bias"), name)


def read_state(name: str, nodes: Mapping[str, ir.Node]) -> tuple[ir.Value | None, ir.Value | None]:
    """Return the weight and the bias of a call; nothing for one that is gone. A Linear is a product and a sum."""
    node = nodes.get(name)
    if node is None:
        return None, None
    second = input_at(nodes[f"{name}.bias"], 1) if node.op_type == "MatMul" else input_at(node, 2)
    return input_at(node, 1), second


def _is_same(state: tuple[ir.Value | None, ...], other: tuple[ir.Value | None, ...]) -> bool:
    pairs = [
        [None if value is None else value.const_value for value in pair] for pair in zip(state, other, strict=True)
    ]
    return all(
        one is two or (one is not None and two is not None and np.array_equal(one.numpy(), two.numpy()))
        for one, two in pairs
    )


def find_heads(parts: Sequence[ir.Node]) -> tuple[ir.Node, ...]:
    """Return those that read the input of all branches, as the first does."""
    return tuple(part for part in parts if part.inputs[0] is parts[0].inputs[0])


def check_values(tensor: torch.Tensor | None) -> None:
    """Raise Refused for a tensor that has no values to compute with; batch norms count batches in integers."""
    if tensor is None or tensor.dtype == torch.int64:
        return
    if type(tensor) not in PLAIN_TENSORS or tensor.is_meta:
        raise Refused("no-values", f"a {type(tensor).__name__} on {tensor.device.type} has no values to compute with")
