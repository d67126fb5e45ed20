"""Fold batch norms in a program of torch.export: its graph goes through the folder, and changed parameters go into a copy.

A batch norm that is gone is no node of the program, and what only it read is no parameter or buffer. A layer that gets a bias
has it as a parameter of its own.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from bnexport.folding.context import Options
from bnexport.folding.folder import check_names
from bnexport.folding.layer_folder import LayerFolder, check_values
from bnexport.folding.report import FoldReport, Refusal, SiteReport, count
from bnexport.folding.rules.parallel import NAME as PARALLEL
from bnexport.graph.nodes import Refused
from bnexport.modules.module_graph import ModuleGraph
from bnexport.modules.module_trace import Trace, name_of, trace_program
from bnexport.modules.tensors import from_array
from bnexport.torch_versions import BatchNormBase
from bnexport.verification.module_proof import prove_module


def fold_program(
    program: torch.export.ExportedProgram, options: Options, *, prove: bool = False
) -> tuple[torch.export.ExportedProgram, FoldReport]:
    """Fold a copy; return it and its report. prove: each fold, where it stands."""
    work = copy.deepcopy(program)
    for old, new in zip(program.graph.nodes, work.graph.nodes, strict=True):
        # The copy has other names for those of Python's own functions, such as `input`; the signature keeps them.
        new.name = old.name
    trace = trace_program(work)
    examples = {
        node.name: node.meta["val"] for node in trace.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)
    }
    graph = ModuleGraph(trace, examples)
    modules = {trace.paths[node]: layer for node, layer in trace.layers.items()}
    norms = [path for path, layer in modules.items() if isinstance(layer, BatchNormBase)]
    for option, names in (("only", options.only or frozenset()), ("skip", options.skip)):
        check_names(option, names - {PARALLEL}, norms, norms, "the program")
    alone = dataclasses.replace(options, skip=options.skip | {PARALLEL})
    folder = LayerFolder(trace, graph, modules, _refusals(trace), alone)
    folder.run()
    _write(work, trace, folder)
    claims = [site.claim for site in folder.sites if site.changed]
    proof = prove_module(graph, trace_program(work), examples, claims) if prove and claims else None
    sites = (*folder.sites, *_other_norms(trace))
    return work, FoldReport(sites, count(graph.model), count(folder.model), False, proof)


def _other_norms(trace: Trace) -> Iterator[SiteReport]:
    """Report the batch norms without fixed statistics and parameters."""
    text = (
        "it normalises with the statistics of the batch, or its parameters are computed; record a module in eval mode"
    )
    for node in trace.graph.nodes:
        if "batch_norm" in name_of(node) and node.op == "call_function" and node not in trace.layers:
            refusal = Refusal("batch_norm", node.name, "training", text)
            yield SiteReport((node.name,), name_of(node), "", "kept", refusals=(refusal,))


def _refusals(trace: Trace) -> dict[str, Refused]:
    """Return why layers and batch norms have to stay as they are, by their paths."""
    found: dict[str, Refused] = {}
    for node, layer in trace.layers.items():
        path = trace.paths[node]
        operands = [each for each in node.all_input_nodes if each in trace.tensors]
        try:
            for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                check_values(tensor)
            if any(user not in trace.layers or trace.paths[user] != path for each in operands for user in each.users):
                raise Refused("read-elsewhere", f"something outside of {path} reads its parameters or statistics")
        except Refused as reason:
            found[path] = reason
    return found


def _write(program: torch.export.ExportedProgram, trace: Trace, folder: LayerFolder) -> None:
    """Write into the program what changed in its graph."""
    calls: dict[str, list[fx.Node]] = {}
    for node in trace.layers:
        calls.setdefault(trace.paths[node], []).append(node)
    for path, name, array in folder.changed():
        like: Any = trace.layers[calls[path][0]].weight
        value = nn.Parameter(from_array(array, like), requires_grad=like.requires_grad)
        operands = calls[path][0].args[1:3]
        old = operands[0] if name == "weight" else operands[1] if len(operands) > 1 else None
        if isinstance(old, fx.Node):
            program.state_dict[trace.tensors[old]] = value
        else:
            _add_bias(program, trace, calls[path], value)
    for path in folder.gone():
        for node in calls[path]:
            # The form of core ATen returns several values, of which inference has one.
            results = [user for user in node.users if user.target is operator.getitem] or [node]
            source: Any = node.args[0]
            for result in results:
                result.replace_all_uses_with(source)
                for spec in program.graph_signature.output_specs:
                    if spec.arg.name == result.name:
                        spec.arg = TensorArgument(source.name)
            for result in dict.fromkeys((*results, node)):
                program.graph.erase_node(result)
        _remove(program, [node for node, each in trace.tensors.items() if each.rpartition(".")[0] == path])
    program.graph_module.recompile()


def _add_bias(
    program: torch.export.ExportedProgram, trace: Trace, calls: Sequence[fx.Node], value: nn.Parameter
) -> None:
    """Add a parameter, and give it to the calls of a layer."""
    weight: Any = calls[0].args[1]
    specs = program.graph_signature.input_specs
    place = next(index for index, spec in enumerate(specs) if spec.arg.name == weight.name)
    with program.graph.inserting_after(weight):
        bias = program.graph.placeholder(f"{weight.name}_bias")
    bias.meta["val"] = weight.meta["val"].new_empty(value.shape)
    target = f"{trace.tensors[weight].rpartition('.')[0]}.bias".removeprefix(".")
    specs.insert(place + 1, InputSpec(InputKind.PARAMETER, TensorArgument(bias.name), target))
    program.state_dict[target] = value
    for call in calls:
        call.args = (*call.args[:2], bias, *call.args[3:])


def _remove(program: torch.export.ExportedProgram, nodes: Sequence[fx.Node]) -> None:
    """Remove those of these parameters and buffers that nothing reads."""
    specs = program.graph_signature.input_specs
    for node in nodes:
        if not node.users:
            spec = next(spec for spec in specs if spec.arg.name == node.name)
            specs.remove(spec)
            program.state_dict.pop(str(spec.target), None)
            program.constants.pop(str(spec.target), None)
            program.graph.erase_node(node)
