"""Fold batch norms in torch modules: a module's graph goes through the folder, and changed parameters go into a copy.

A batch norm that is gone becomes an Identity. Of merged branches one module becomes the convolution that is their sum, the
others return zeros.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import onnx_ir as ir
import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from bnexport.errors import UnsupportedModelError, UsageError, VerificationError
from bnexport.folding.context import Options
from bnexport.folding.folder import check_names
from bnexport.folding.layer_folder import SLOTS, LayerFolder, check_values, find_heads, read_state
from bnexport.folding.report import Counts, FoldReport, Refusal, SiteReport, count
from bnexport.folding.rules.parallel import NAME as PARALLEL
from bnexport.graph.nodes import Refused, get_int, get_ints
from bnexport.modules.copies import copy_model
from bnexport.modules.module_graph import ModuleGraph
from bnexport.modules.module_trace import (
    CONVS,
    Trace,
    Zero,
    is_layer,
    is_plain_batch_norm,
    name_of,
    trace,
    trace_program,
)
from bnexport.modules.tensors import from_array
from bnexport.sync_bn.convert import become, replace, split_activation, to_plain
from bnexport.sync_bn.recognition import has_hooks, is_sync_batch_norm
from bnexport.torch_versions import BatchNormBase, Operator
from bnexport.verification.reference import compare, prove_module
from bnexport.verification.verdict import Method, as_method

Foldable = TypeVar("Foldable", bound=nn.Module | torch.export.ExportedProgram)


def fold_module(
    model: Foldable,
    example_inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
    *,
    verify: bool | Method = True,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    max_scale: float = 1e6,
) -> Foldable:
    """Copy `model` for inference and fold its batch norms into the neighbouring layers.

    Every batch norm that `convert_sync_batchnorm` knows is taken with its running statistics, whatever
    mode the module is in. The module is written as a graph, which is folded as `fold` does it, as far as only parameters of
    Conv1d/2d/3d, ConvTranspose1d/2d/3d and Linear change; an Identity takes the place of a batch norm. Sums of parallel
    branches of one value become one convolution where that costs no more; the modules of the other branches return a zero
    without dimensions. The copy keeps the model's classes, code and hooks, is in eval mode, and shares no memory with
    `model`, which stays as it is.

    Where values go is found by torch.fx. Submodules that it cannot trace keep their batch norms.
    Convolutions are taken to get batches, as batch norms do, unless example_inputs show otherwise; a
    Linear takes a map only where they show its rank, since in (N, L, C) a batch norm's channels are L.

    Args:
        model: a module; or a program of torch.export, of which a folded copy is returned, its branches not merged. There the
            program is taken as it is, in the mode in which it was recorded.
        example_inputs: a tensor, or those of the positional parameters. Other parameters keep their
            defaults, and it is for such calls that the folded module equals the model.
        verify: "local" proves each fold where it stands, in float64, and that everything else is the same; "whole" runs
            both modules on example_inputs and compares, hooks run, too; "both" does both. True is "both" where
            example_inputs are given and "local" elsewhere, False is nothing.
        only: paths of the batch norms to fold, as the report shows them; None for all. `parallel` stands for all merges
            of branches.
        skip: paths of batch norms to leave alone; `parallel` for branches.
        max_scale: largest |gamma| / sqrt(var + eps) that is folded.

    Returns the module; its attribute `fold_report` (a FoldReport) tells what happened to each batch norm.

    Raises:
        UsageError: an argument is wrong, or the model fails on example_inputs.
        UnsupportedModelError: torch.fx cannot trace the model's own forward. Fold the submodules that it can trace.
        VerificationError: the folded module differs from the model by more than the tolerance.
    """
    if not isinstance(model, nn.Module | torch.export.ExportedProgram):
        raise UsageError(f"model: got {type(model).__name__}, expected a torch.nn.Module or an exported program")
    inputs = _inputs(example_inputs)
    options = Options.of(max_scale=max_scale, only=only, skip=skip)
    method = as_method(verify)
    if verify == "whole" and inputs is None:
        raise UsageError('verify: got "whole", which needs example_inputs; expected "local", or example_inputs')
    prove = method not in (None, "whole")
    folded: Any
    if isinstance(model, torch.export.ExportedProgram):
        folded, report = fold_program(model, options, prove=prove)
    else:
        folded, report = fold_copy(model, inputs, options, prove=prove)
    if method is not None and report.changed:
        result = report.verification
        if method != "local" and inputs is not None and (result is None or result.status != "failed"):
            whole = compare(_to_run(model), _to_run(folded), inputs)
            result = whole if result is None else result.joined(whole)
        assert result is not None, "nothing compared what has changed"
        if result.status == "failed":
            raise VerificationError(f"the folded module differs from the original: {result.reason}")
        report = dataclasses.replace(report, verification=result)
    folded.fold_report = report
    return folded


def _to_run(model: nn.Module | torch.export.ExportedProgram) -> nn.Module:
    if isinstance(model, torch.export.ExportedProgram):
        return model.module()
    return copy_model(model, share_parameters=True).eval()


def fold_copy(
    model: nn.Module, inputs: tuple[torch.Tensor, ...] | None, options: Options, *, prove: bool = False
) -> tuple[nn.Module, FoldReport]:
    """Fold a copy; return it and its report, not compared with `model`. prove: each fold, where it stands."""
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(f"model: got a {type(model).__name__}; fold the module that it was made from")
    if any(_is_program(module) for module in model.modules()):
        raise UsageError(
            "model: got a module of an exported program; fold the program: bnexport.fold_module(program).module()"
        )
    training = {path for path, module in model.named_modules() if module.training}
    classes = {path: type(module).__name__ for path, module in model.named_modules()}
    work = replace(copy_model(model), functools.partial(to_plain, split=True)).eval()
    before = _count(model)
    norms = [path for path, module in work.named_modules() if isinstance(module, BatchNormBase)]
    for option, names in (("only", options.only or frozenset()), ("skip", options.skip)):
        check_names(option, names - {PARALLEL}, norms, norms, "the model")
    taken_apart = _take_activations_apart(work)
    inner = {path: f"{path}.norm" for path in taken_apart}
    first = trace(work, None if inputs is None else len(inputs))
    examples = first.examples(inputs)
    graph = ModuleGraph(first, examples)
    modules = dict(work.named_modules())
    folder = LayerFolder(first, graph, modules, _refusals(work, first, graph.calls), _with_names(options, inner))
    folder.run()
    _write(work, modules, folder)
    sites = folder.sites
    outer = {path: name for name, path in inner.items()}
    proof = None
    if any(site.changed for site in sites):
        second = _trace_again(work, first, ", ".join(site.name for site in sites if site.changed))
        if prove:
            proof = prove_module(graph, second, examples, [site.claim for site in sites if site.changed])
    for module, kind, state in taken_apart.values():
        if isinstance(module.norm, BatchNormBase):
            become(module, kind, state)
    sites = [dataclasses.replace(site, nodes=tuple(outer.get(path, path) for path in site.nodes)) for site in sites]
    report = FoldReport(
        sites=tuple(_as_in_the_source(site, classes, training) for site in sites),
        before=before,
        after=_count(work),
        meaning_changed=any(site.outcome == "folded" and site.nodes[0] in training for site in sites),
        verification=proof,
    )
    return work, report


def _is_program(module: nn.Module) -> bool:
    """Whether the code of a module is a graph of torch's operators, in which batch norms are no modules."""
    return isinstance(module, fx.GraphModule) and any(isinstance(node.target, Operator) for node in module.graph.nodes)


def _take_activations_apart(work: nn.Module) -> dict[str, tuple[nn.Module, type[nn.Module], dict[str, Any]]]:
    """Split norms with activations into Sequentials of `norm`, `drop` and `act`; return the original classes, by
    path.
    """
    found = {}
    for path, module in list(work.named_modules()):
        apart = split_activation(module) if path else None
        if apart is not None:
            found[path] = module, type(module), dict(module.__dict__)
            become(module, type(apart), apart.__dict__)
    return found


def _with_names(options: Options, names: dict[str, str]) -> Options:
    only = None if options.only is None else frozenset(names.get(path, path) for path in options.only)
    return dataclasses.replace(options, only=only, skip=frozenset(names.get(path, path) for path in options.skip))


def _trace_again(work: nn.Module, first: Trace, folded: str) -> Trace:
    """Trace the folded model and check that it takes the same path: code may ask for a batch norm's attributes or
    class.
    """
    try:
        second = trace(work, sum(node.op == "placeholder" for node in first.graph.nodes))
        if second.outline() == first.outline() and second.opaque == first.opaque:
            return second
        cause = next(iter(second.opaque.items() - first.opaque.items()), ("", "its code takes another way"))[1]
    except UnsupportedModelError as error:
        cause = str(error)
    raise UnsupportedModelError(
        f"{type(work).__name__}: its forward looks at batch norms other than by calling them, and fails when they are"
        f" folded ({cause}); leave those with skip=[...], folded were {folded}"
    )


def _inputs(example_inputs: torch.Tensor | Sequence[torch.Tensor] | None) -> tuple[torch.Tensor, ...] | None:
    if example_inputs is None:
        return None
    inputs = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    for index, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"example_inputs[{index}]: got {type(value).__name__}, expected a torch.Tensor")
    return inputs


def _as_in_the_source(site: SiteReport, classes: dict[str, str], training: set[str]) -> SiteReport:
    """Restore the class that the model's author used in a report; a batch norm with an activation was split in two."""
    path = site.nodes[0]
    source = path if path in classes else path.rpartition(".")[0]
    return dataclasses.replace(site, op_type=classes.get(source, site.op_type), training=source in training)


def _count(model: nn.Module) -> Counts:
    """Count the modules without children, identities excluded."""
    modules = list(model.modules())
    sync = sum(is_sync_batch_norm(module) for module in modules)
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    leaves = [module for module in modules if not module._modules and not isinstance(module, nn.Identity)]
    return Counts(
        nodes=len(leaves),
        batch_norm=sum(isinstance(module, BatchNormBase) for module in modules) - sync,
        sync_batch_norm=sync,
        parameter_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        operators=dict(collections.Counter(type(module).__name__ for module in leaves)),
    )


# Reasons for which a layer or a batch norm stays, whatever stands next to it.


def _refusals(work: nn.Module, trace: Trace, calls: Mapping[str, Sequence[ir.Node]]) -> dict[str, Refused]:
    """Return why layers and batch norms have to stay as they are, by their paths."""
    hidden = {id(module): path for path in trace.opaque for module in work.get_submodule(path).modules()}
    paths = [path for node, path in trace.tensors.items() if str(node.target).startswith("model.")]
    read = {id(getattr(work.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2])) for path in paths}
    found: dict[str, Refused] = {}
    for path, module in work.named_modules():
        norm = isinstance(module, BatchNormBase)
        if not norm and not is_layer(module):
            continue
        try:
            if norm and not is_plain_batch_norm(module):
                raise Refused("own-forward", f"{type(module).__name__} has a forward of its own")
            if (place := hidden.get(id(module))) is not None:
                raise Refused("opaque", f"inside {place}, which torch.fx cannot trace: {trace.opaque[place]}")
            if has_hooks(module):
                raise Refused("hook", f"{path} has hooks")
            if any(id(tensor) in read for tensor in (*module.parameters(), *module.buffers())):
                raise Refused("read-elsewhere", f"code outside of {path} reads its parameters or statistics")
            if hasattr(module, "parametrizations"):
                raise Refused(
                    "parametrized", f"the parameters of {path} are computed; remove the parametrization first"
                )
            if norm and getattr(module, "running_mean", None) is None:
                raise Refused("training", "it has no running statistics, so it normalises with those of the batch")
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                check_values(tensor)
            if norm and path not in calls:
                raise Refused("unused", "the forward does not call it, or with more than one tensor")
        except Refused as reason:
            found[path] = reason
    return found


def _convolution(node: ir.Node, like: Any, sign: float) -> nn.Module:
    """Make a convolution of a Conv node, with the type, device and gradient of `like`."""
    weight, bias = (
        None if value is None else value.const_value for value in read_state(str(node.name), {str(node.name): node})
    )
    assert weight is not None
    outputs, inputs, *sizes = weight.shape.numpy()
    groups = get_int(node, "group", 1)
    kind: Any = CONVS[len(sizes) - 1]
    module: nn.Module = kind(
        inputs * groups,
        outputs,
        sizes,
        stride=get_ints(node, "strides"),
        padding=(get_ints(node, "pads") or ())[: len(sizes)],
        dilation=get_ints(node, "dilations"),
        groups=groups,
        bias=bias is not None,
        device="meta",
    )
    for name, tensor in zip(SLOTS, (weight, bias), strict=True):
        if tensor is not None:
            values = from_array(tensor.numpy() if sign > 0 else -tensor.numpy(), like.weight)
            module._parameters[name] = nn.Parameter(values, requires_grad=like.weight.requires_grad)
    return module


def _write(work: nn.Module, modules: Mapping[str, nn.Module], folder: LayerFolder) -> None:
    """Write into the module what changed in its graph; the old tensors are not changed."""
    for path, name, array in folder.changed():
        parameters = modules[path]._parameters
        like, old = parameters["weight"], parameters.get(name)
        assert like is not None
        needs = (old if old is not None else like).requires_grad
        parameters[name] = nn.Parameter(from_array(array, like), requires_grad=needs)
    new: dict[nn.Module, nn.Module] = {modules[path]: nn.Identity() for path in folder.gone()}
    for merge in folder.merges:
        heads = find_heads(merge.parts)
        new.update((modules[str(part.name)], Zero() if part in heads else nn.Identity()) for part in merge.parts)
        largest = modules[str(merge.node.name)]
        new[modules[str(merge.carrier.name)]] = _convolution(merge.node, largest, merge.sign)
    for owner in list(work.modules()):
        for name, child in list(owner._modules.items()):
            if child in new:
                owner._modules[name] = new[child]
                new[child].training = child.training


# Fold batch norms in a program of torch.export: its graph goes through the folder, and changed parameters go into a copy.
#
# A batch norm that is gone is no node of the program, and what only it read is no parameter or buffer. A layer that gets a bias
# has it as a parameter of its own.


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
    folder = LayerFolder(trace, graph, modules, _program_refusals(trace), alone)
    folder.run()
    _write_program(work, trace, folder)
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


def _program_refusals(trace: Trace) -> dict[str, Refused]:
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


def _write_program(program: torch.export.ExportedProgram, trace: Trace, folder: LayerFolder) -> None:
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
