"""Tracing of a function of named tensors to an ONNX graph.

    make_fx         runs the function on fake tensors and records it, autograd's backward included
    torch.export    makes the record functional; shapes stay symbolic in dimension 0 of a batch
    torch.onnx      translates it, with the tables of bnexport.training.translations

torch.export alone cannot record torch.autograd.grad: strict mode writes a graph whose gradients are
wrong, the other refuses.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx, nn
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import make_fx

from bnexport import torch_versions
from bnexport.errors import BnexportError, UnsupportedModelError, first_line
from bnexport.exporting import dynamo
from bnexport.exporting.dimensions import SizeConditions
from bnexport.exporting.dynamo import no_stack_traces, quiet, write_doubles, write_floor_divisions
from bnexport.exporting.finish import MINIMUM_OPSET
from bnexport.modules.copies import room_for
from bnexport.training import dropout, optimizers, translations
from bnexport.training.step import Problem

# Ranges of the labels and indices in a batch, read from a recorded step.
#
# torch raises an error for a label beyond the classes. ONNX's GatherElements reads -1 as the last class, and ONNX Runtime
# fails in the middle of a step for those beyond. So a session checks the arrays before the step.

_ATEN = torch.ops.aten
# What keeps every number of an array.
_VIEWS = {
    "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "flatten", "permute", "transpose", "t", "clone", "alias",
    "detach", "_to_copy", "expand", "contiguous",
}  # fmt: skip
_LOSSES = {_ATEN.nll_loss_forward.default, _ATEN.nll_loss2d_forward.default}
_SHIFTS = {_ATEN.add.Tensor: operator.sub, _ATEN.sub.Tensor: operator.add}


def index_ranges(graph: fx.Graph, names: Sequence[str]) -> dict[str, list[list[int]]]:
    """Return for each of the graph's inputs `names` the ranges of its whole numbers, each as [first, last, ignored...]."""
    ranges: dict[str, list[list[int]]] = {}
    for name, node in zip(names, graph.find_nodes(op="placeholder"), strict=True):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point and value.dtype != torch.bool:
            found = list(_ranges_of(node, 0))
            if found:
                ranges[name] = [each for index, each in enumerate(found) if each not in found[:index]]
    return ranges


def _ranges_of(node: fx.Node, shift: int) -> Iterator[list[int]]:
    """Yield the ranges of an array; `node` holds its numbers minus `shift`."""
    for user in node.users:
        count, ignored = _indexed(user, node)
        if count is not None:
            yield [shift, shift + count - 1, *(shift + each for each in ignored)]
        elif user.args and user.args[0] is node and isinstance(user.target, torch_versions.Operator):
            if user.target.overloadpacket.__name__ in _VIEWS and not user.meta["val"].dtype.is_floating_point:
                yield from _ranges_of(user, shift)
            elif user.target in _SHIFTS and isinstance(user.args[1], int) and not user.kwargs:
                yield from _ranges_of(user, _SHIFTS[user.target](shift, user.args[1]))


def _indexed(user: fx.Node, node: fx.Node) -> tuple[int | None, tuple[int, ...]]:
    """Return the number of what `user` selects from by the numbers of `node`, None if it does not; and its ignored
    number.
    """
    arguments: Sequence[Any] = user.args
    if user.target in _LOSSES and arguments[1] is node:
        scores = arguments[0].meta["val"]
        return _fixed(scores.shape[1 if scores.dim() > 1 else 0]), (arguments[4],)
    if user.target is _ATEN.embedding.default and arguments[1] is node:
        return _fixed(arguments[0].meta["val"].shape[0]), ()
    if user.target is _ATEN.gather.default and arguments[2] is node:
        return _fixed(arguments[0].meta["val"].shape[arguments[1]]), ()
    return None, ()


def _fixed(size: int | torch.SymInt) -> int | None:
    return size if isinstance(size, int) else None


Tensor = torch.Tensor
Named = dict[str, Tensor]

BATCH = "batch"

_DATA_DEPENDENT = (
    *torch_versions.data_dependent_errors(),
    symbolic_shapes.GuardOnDataDependentSymNode,
)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What a recorded function asks of its arguments.

    sizes: conditions on those of the dynamic arguments, in their order. indices: as in `Description`.
    """

    sizes: SizeConditions
    indices: dict[str, list[list[int]]]


def trace(
    function: Callable[[Named], Named],
    arguments: Named,
    dynamic: Mapping[str, str],
    problem: Problem,
    *,
    differentiates: bool,
    standard_ops_only: bool,
    cpu_kernels: bool,
) -> tuple[ir.Model, Recorded]:
    """Return the ONNX graph of `function`, with inputs and outputs under their names, and what it asks of arguments.

    The conditions are known where the function computes gradients.

    dynamic: arguments whose dimension 0 is dynamic, with its name. Those of equal size there have one name.
    problem: knows which module runs, for messages. differentiates: whether the function computes gradients.
    standard_ops_only, cpu_kernels: which operators the graph may hold (translations.translation_table).

    Raises UnsupportedModelError: data-dependent control flow, a batch size that the model fixes, random
    numbers, an operator without translation.
    """
    results: list[str] = []

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        made = function(dict(zip(arguments, tensors)))
        results[:] = made
        return _distinct(made.values())

    module, recorded = _Module(flat), Recorded(SizeConditions([]), {})
    if differentiates:
        with room_for(problem.model):
            code, recorded = _record(flat, arguments, dynamic, problem)
        module = _Module(code)
    shapes = [{0: torch.export.Dim.DYNAMIC} if name in dynamic else None for name in arguments]
    with quiet(), room_for(problem.model):
        try:
            with torch.no_grad():
                program = torch.export.export(
                    module, tuple(arguments.values()), dynamic_shapes=(tuple(shapes),), strict=False
                )
        except BnexportError:
            raise
        except (torch_versions.user_error(), symbolic_shapes.ConstraintViolationError, ValueError) as error:
            if _is_data_dependent(error):
                raise _recording_error(error, problem.where) from error
            raise UnsupportedModelError(
                f"{_place(problem.where)}the graph cannot be exported with a dynamic batch size: {first_line(error)}; "
                "a model that fixes the batch size exports with dynamic=False"
            ) from error
        except Exception as error:
            raise _recording_error(error, problem.where) from error
        program = dynamo.rewrite(program)
        torch_versions.drop_guards(program)
        _refuse_constant_state(program, problem)
        _refuse_random_numbers(program, problem)
        write_floor_divisions(program)
        table: dict[Any, Callable[..., Any]] = dict(translations.translation_table(standard_ops_only, cpu_kernels))
        try:
            with no_stack_traces():
                exported = torch.onnx.export(
                    program,
                    dynamo=True,
                    custom_translation_table={**table, **dropout.TRANSLATIONS, **optimizers.TRANSLATIONS},
                    dynamic_shapes=(tuple({0: dynamic[name]} if name in dynamic else None for name in arguments),),
                    input_names=list(arguments),
                    output_names=results,
                    optimize=False,
                    opset_version=MINIMUM_OPSET,
                    verbose=False,
                )
        except Exception as error:
            raise _translation_error(error, problem) from error
    assert exported is not None
    write_doubles(exported)
    return exported.model, recorded


def _distinct(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Copy results that are returned twice: a graph output has one name."""
    seen: set[int] = set()
    outputs = []
    for tensor in tensors:
        outputs.append(tensor.clone() if id(tensor) in seen else tensor)
        seen.add(id(tensor))
    return tuple(outputs)


class _Module(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def _record(
    function: Callable[..., Any], arguments: Named, dynamic: Mapping[str, str], problem: Problem
) -> tuple[fx.GraphModule, Recorded]:
    environment = symbolic_shapes.ShapeEnv()
    mode = torch_versions.fake_tensors(environment)

    def fake(name: str, tensor: Tensor) -> Tensor:
        static = symbolic_shapes.DimDynamic.STATIC
        sizes = [static] * tensor.dim()
        if name in dynamic:
            # Dimensions of equal size share a symbol: the rows of a batch.
            sizes[0] = symbolic_shapes.DimDynamic.DUCK
        context: Any = symbolic_shapes.StatelessSymbolicContext(dynamic_sizes=sizes)
        return mode.from_tensor(tensor.detach(), symbolic_context=context, source=torch_versions.source(name))

    fakes = [fake(name, tensor) for name, tensor in arguments.items()]
    try:
        recorded = make_fx(
            function,
            # Here, and not in run_decompositions: one more pass over the program costs a third of the export.
            decomposition_table=translations.decompositions(),
            tracing_mode="symbolic",
            _allow_non_fake_inputs=True,
        )(*fakes)
    except BnexportError as error:
        raise type(error)(f"{_place(problem.where)}{error}") from error
    except Exception as error:
        # torch raises many types here; what they share is that this model cannot be recorded.
        raise _recording_error(error, problem.where) from error
    _refuse_fixed_size(environment)
    recorded.graph.eliminate_dead_code()
    recorded.recompile()
    conditions = SizeConditions([tensor for name, tensor in zip(arguments, fakes) if name in dynamic], asked=True)
    return recorded, Recorded(conditions, index_ranges(recorded.graph, list(arguments)))


def _refuse_fixed_size(environment: symbolic_shapes.ShapeEnv) -> None:
    """Refuse code that uses the batch size as a number (as TorchScript does): the trace would hold the example's.

    Bounds say less: torch's own choice of a convolution asks whether there are 16 rows. Verification runs a
    second size.
    """
    for sizes in environment.var_to_range.values():
        if sizes.is_singleton():
            raise UnsupportedModelError(
                "the graph cannot be exported with a dynamic batch size: code in the model, such as a function compiled by"
                f" torch.jit.script, takes it as the number {sizes.lower}; a model that fixes the batch size exports with"
                " dynamic=False"
            )


def _is_data_dependent(error: BaseException | None) -> bool:
    """Whether torch stopped at a branch on a tensor's values; its errors wrap each other."""
    seen = 0
    while error is not None and seen < 20:
        if isinstance(error, _DATA_DEPENDENT):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def _recording_error(error: Exception, where: str) -> UnsupportedModelError:
    if _is_data_dependent(error):
        return UnsupportedModelError(
            f"{_place(where)}the code reads values of a tensor to decide what to compute, which one graph cannot hold; "
            "replace the branch or the .item() by torch.where, or move it out of the training step"
        )
    if "element 0 of tensors does not require grad" in str(error):
        return UnsupportedModelError(
            f"{_place(where)}the forward differentiates, as a gradient penalty does, and evaluation and inference have no"
            " gradients; differentiate only where torch.is_grad_enabled() is true, and return zeros of the same shape elsewhere"
        )
    return UnsupportedModelError(
        f"{_place(where)}the training step cannot be recorded: {type(error).__name__}: {first_line(error)}"
    )


def _place(where: str) -> str:
    return f"module {where!r}: " if where else ""


def _refuse_constant_state(program: torch.export.ExportedProgram, problem: Problem) -> None:
    """Refuse parameters and buffers that were not read from the arguments: they would keep their values of now."""
    for tensor in (*program.state_dict.values(), *program.constants.values()):
        name = problem.owner(tensor) if isinstance(tensor, Tensor) else ""
        if name:
            raise UnsupportedModelError(
                f"{name}: the code reads it from elsewhere than its module: a loss that uses the model, a tensor kept in a"
                " list, or a backward of its own; the graph would keep its value of now. Read it as an attribute of its"
                " module in forward, and let forward return what the loss needs"
            )


def _refuse_random_numbers(program: torch.export.ExportedProgram, problem: Problem) -> None:
    for node in program.graph.nodes:
        if isinstance(node.target, torch_versions.Operator) and _draws(node.target, node.args, node.kwargs):
            raise UnsupportedModelError(
                f"{_place(problem.module_of(str(node.target)))}{node.target} draws random numbers, which a graph cannot "
                "repeat; use dropout, torch.rand or bernoulli, which are seeded, or pass the numbers as an input"
            )


def _draws(operator: torch_versions.Operator, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether the operator draws random numbers; dropout in eval mode, and attention without dropout, draw none."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    given = {argument.name: argument.default_value for argument in operator._schema.arguments}
    given |= {**dict(zip(given, arguments)), **options}
    return given.get("train") is not False and given.get("dropout_p", given.get("p")) != 0


def _translation_error(error: Exception, problem: Problem) -> UnsupportedModelError:
    """Name the operator that torch.onnx could not translate, and its module."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    known = next((link for link in chain if isinstance(link, UnsupportedModelError)), None)
    for link in chain:
        found = re.search(r"No ONNX function found for <OpOverload\(op='([\w.:]+)', overload='(\w+)'\)>", str(link))
        if found:
            name = f"{found.group(1)}.{found.group(2)}"
            if "batch_norm_double_backward" in name:
                return UnsupportedModelError(
                    "a gradient of a batch norm's gradient, as in a gradient penalty, has no ONNX translation; compute the"
                    " penalty by a network without batch norm, or train in torch"
                )
            return UnsupportedModelError(
                f"{_place(problem.module_of(name))}operator {name} has no ONNX translation; replace it in the model, "
                "or see docs/training.md for the supported operators"
            )
    if known is not None:
        return UnsupportedModelError(str(known))
    return UnsupportedModelError(f"the training step cannot be translated to ONNX: {first_line(chain[-1])}")
