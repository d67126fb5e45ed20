"""Contract of the two operators: names, types, shapes, attributes and defaults.

`MMCVSyncBatchNorm` is the node that MMCV writes for its synchronised batch norm, and
`MMCVSyncBatchNormGrad` is its gradient. The ONNX `OpSchema`, the table in `docs/operator.md`, the
exporters, the portable body and the checks of the compiled library all derive from the records
below or are tested against them.

Standard library only, so that a build step or a small tool can read it; `op_schema` imports onnx.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

if TYPE_CHECKING:
    import onnx

DOMAIN = "mmcv"
# Of the nodes that MMCV and MMDeploy write.
MMCV_DOMAINS = ("mmcv", "mmdeploy")
TRAINING_DOMAIN = "bnexport"  # the operators of training steps: training/contract.py
# Key of the metadata of a training step's graph.
TRAINING_METADATA = "bnexport.training"
VERSION = 1
# Old exports wrote the node into the default domain; the library serves both.
ACCEPTED_DOMAINS = ("mmcv", "")

T_TYPES = ("float16", "bfloat16", "float", "double")
S_TYPES = ("float", "double")

# The name under which exporters write torch.distributed's default group.
WORLD_GROUP = "world"

# The update of the state tensor `name` is `name.new`: ONNX forbids one name for both.
NEW_SUFFIX = ".new"
# Version of the reports that are printed with --json and that `to_dict` gives.
REPORT_VERSION = 1

STATS_MODES = ("exact", "default", "N")
GRAD_REDUCTIONS = ("local", "mean", "sum")


class AttributeKind(enum.Enum):
    FLOAT = "float"
    INT = "int"
    INTS = "ints"
    STRING = "string"


@dataclasses.dataclass(frozen=True)
class Value:
    """An input or output. `type` is "T" (the data's type) or "S" (the statistics' type)."""

    name: str
    type: str
    shape: str
    doc: str
    optional: bool = True


@dataclasses.dataclass(frozen=True)
class Attribute:
    """An attribute with its default, None if there is none. `allowed` lists the accepted values if they are few."""

    name: str
    kind: AttributeKind
    default: Any
    doc: str
    allowed: tuple[int | str, ...] | None = None
    required: bool = False


@dataclasses.dataclass(frozen=True)
class Operator:
    name: str
    doc: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attributes: tuple[Attribute, ...]
    domain: str = DOMAIN
    version: int = VERSION
    types: tuple[str, ...] = T_TYPES

    def attribute(self, name: str) -> Attribute:
        """Return the attribute of that name. Raise KeyError if it does not exist.

        >>> SYNC_BATCH_NORM.attribute("stats_mode").allowed
        ('exact', 'default', 'N')
        """
        for attribute in self.attributes:
            if attribute.name == name:
                return attribute
        raise KeyError(f"{self.name} has no attribute {name!r}")


_MOMENTUM = Attribute(
    "momentum",
    AttributeKind.FLOAT,
    0.1,
    "Weight of the new value in the running statistics, within [0, 1] (PyTorch's convention; ONNX uses 1 - momentum).",
)
_EPS = Attribute(
    "eps",
    AttributeKind.FLOAT,
    1e-5,
    "Added to the variance; finite, >= 0. invstd is 0 where variance and eps are both 0.",
)
_GROUP = Attribute(
    "group",
    AttributeKind.STRING,
    "",
    f'Name of the registered process group; "{WORLD_GROUP}" for the default group. Unused when group_size is 1.'
    " An int, as MMCV's own exporter writes it, stands for its decimal digits.",
)
_GROUP_SIZE = Attribute(
    "group_size",
    AttributeKind.INT,
    1,
    "Number of processes that share statistics, >= 1; checked against the registered group.",
)
_STATS_MODE = Attribute(
    "stats_mode",
    AttributeKind.STRING,
    "exact",
    "How the group's statistics are merged: exact (count, mean, M2), or MMCV's default and N.",
    STATS_MODES,
)

SYNC_BATCH_NORM = Operator(
    name="MMCVSyncBatchNorm",
    doc="Batch normalisation over the batch and spatial axes, with statistics shared by a group of processes.",
    inputs=(
        Value("input", "T", "(N, C, *)", "The data, rank >= 2.", optional=False),
        Value("running_mean", "S", "(C,)", "Running mean. Required in inference."),
        Value("running_var", "S", "(C,)", "Running variance (unbiased). Required in inference."),
        Value("weight", "S", "(C,)", "Scale; absent means 1."),
        Value("bias", "S", "(C,)", "Shift; absent means 0."),
    ),
    outputs=(
        Value("output", "T", "(N, C, *)", "weight * (input - mean) * invstd + bias.", optional=False),
        Value("running_mean_out", "S", "(C,)", "Updated running mean; unchanged in inference. Needs running_mean."),
        Value("running_var_out", "S", "(C,)", "Updated running variance; unchanged in inference. Needs running_var."),
        Value(
            "saved_mean", "S", "(C,)", "The mean that was used: of the group's batch in training, running in inference."
        ),
        Value("saved_invstd", "S", "(C,)", "1 / sqrt(variance + eps) that was used."),
    ),
    attributes=(
        _MOMENTUM,
        _EPS,
        _GROUP,
        _GROUP_SIZE,
        Attribute(
            "training_mode",
            AttributeKind.INT,
            1,
            "1: statistics of the batch over the group; 0: running statistics.",
            (0, 1),
        ),
        _STATS_MODE,
    ),
)

SYNC_BATCH_NORM_GRAD = Operator(
    name="MMCVSyncBatchNormGrad",
    doc="Gradient of MMCVSyncBatchNorm. Its outputs are index-aligned with the forward's inputs.",
    inputs=(
        Value("grad_output", "T", "(N, C, *)", "Gradient of the loss by the forward's output.", optional=False),
        Value("input", "T", "(N, C, *)", "The forward's input.", optional=False),
        Value("weight", "S", "(C,)", "The forward's scale; absent means 1."),
        Value("saved_mean", "S", "(C,)", "The forward's saved_mean.", optional=False),
        Value("saved_invstd", "S", "(C,)", "The forward's saved_invstd.", optional=False),
    ),
    outputs=(
        Value("grad_input", "T", "(N, C, *)", "Gradient by the input."),
        Value("unused_running_mean", "S", "(C,)", "Never produced: running_mean has no gradient. Leave it empty."),
        Value("unused_running_var", "S", "(C,)", "Never produced: running_var has no gradient. Leave it empty."),
        Value("grad_weight", "S", "(C,)", "Gradient by the weight, reduced over the group as grad_reduction says."),
        Value("grad_bias", "S", "(C,)", "Gradient by the bias, reduced over the group as grad_reduction says."),
    ),
    attributes=(
        _GROUP,
        _GROUP_SIZE,
        Attribute(
            "training_mode",
            AttributeKind.INT,
            1,
            "1: differentiate through the batch statistics; 0: fixed statistics, grad_input = weight * invstd * grad_output.",
            (0, 1),
        ),
        _STATS_MODE,
        Attribute(
            "grad_reduction",
            AttributeKind.STRING,
            "local",
            "grad_weight and grad_bias: this process's sums (local, as torch), or their mean (as MMCV) or sum over the group.",
            GRAD_REDUCTIONS,
        ),
    ),
)

OPERATORS = (SYNC_BATCH_NORM, SYNC_BATCH_NORM_GRAD)


class GroupSpec(NamedTuple):
    """Sharing of statistics and gradients: the last arguments of every torch operator, in this order.

    layer: a number of the module, the same in every process; mismatched calls are told apart by it.
    """

    group: str
    group_size: int
    stats_mode: str
    grad_reduction: str
    layer: int


# One process by itself.
LOCAL = GroupSpec("", 1, "exact", "local", 0)


class Argument(NamedTuple):
    """An argument of a torch operator; `type` as torch's schema strings write it."""

    name: str
    type: str


@dataclasses.dataclass(frozen=True)
class TorchOperator:
    """A torch operator of the library `bnexport`; all return tensors."""

    name: str
    arguments: tuple[Argument, ...]
    results: int

    @property
    def definition(self) -> str:
        """The schema string for torch.library.

        >>> TorchOperator("f", (Argument("x", "Tensor"),), 1).definition
        'f(Tensor x) -> (Tensor)'
        """
        arguments = ", ".join(f"{argument.type} {argument.name}" for argument in self.arguments)
        return f"{self.name}({arguments}) -> ({', '.join(['Tensor'] * self.results)})"

    def sign(self, function: Callable[..., Any], *leading: str) -> Callable[..., Any]:
        """Give a function of *arguments the operator's arguments as its signature, for exporters that inspect it.

        leading: names of further arguments in front. They are annotated by a class, as torch 2.4 expects: Any is none
        before Python 3.11.
        """
        kinds: dict[str, Any] = dict.fromkeys(leading, object) | {
            argument.name: _PYTHON_TYPES.get(argument.type, Any) for argument in self.arguments
        }
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, positional, annotation=kind) for name, kind in kinds.items()]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = dict(kinds)
        return function

    def bind(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        return dict(zip((argument.name for argument in self.arguments), arguments, strict=True))


_PYTHON_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str}
_GROUP_ARGUMENTS = tuple(Argument(name, kind.__name__) for name, kind in get_type_hints(GroupSpec).items())


def _arguments(text: str) -> tuple[Argument, ...]:
    """Return the arguments of a torch schema string, followed by those of the group."""
    pairs = (part.split() for part in text.split(", "))
    return (*(Argument(name, kind) for kind, name in pairs), *_GROUP_ARGUMENTS)


TORCH_SYNC_BATCH_NORM = TorchOperator(
    "sync_batch_norm",
    _arguments(
        "Tensor input, Tensor? running_mean, Tensor? running_var, Tensor? weight, Tensor? bias, "
        "bool training, float momentum, float eps"
    ),
    results=5,
)
TORCH_SYNC_BATCH_NORM_BACKWARD = TorchOperator(
    "sync_batch_norm_backward",
    _arguments(
        "Tensor grad_output, Tensor input, Tensor? weight, Tensor saved_mean, Tensor saved_invstd, "
        "bool training, bool[3] output_mask"
    ),
    results=3,
)
TORCH_SYNC_BATCH_NORM_DOUBLE_BACKWARD = TorchOperator(
    "sync_batch_norm_double_backward",
    _arguments(
        "Tensor? grad_grad_input, Tensor? grad_grad_weight, Tensor? grad_grad_bias, "
        "Tensor grad_output, Tensor input, Tensor? weight, Tensor saved_mean, Tensor saved_invstd, bool training"
    ),
    results=3,
)
TORCH_OPERATORS = (TORCH_SYNC_BATCH_NORM, TORCH_SYNC_BATCH_NORM_BACKWARD, TORCH_SYNC_BATCH_NORM_DOUBLE_BACKWARD)


def node_attributes(operator: Operator, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ONNX attributes of a node for a call of the torch operator with these arguments."""
    casts = {AttributeKind.INT: int, AttributeKind.FLOAT: float, AttributeKind.STRING: str}
    return {
        attribute.name: casts[attribute.kind](
            arguments["training" if attribute.name == "training_mode" else attribute.name]
        )
        for attribute in operator.attributes
    }


def op_schema(operator: Operator) -> onnx.defs.OpSchema:
    """Return the ONNX schema of `operator`, MMCVSyncBatchNorm or its gradient."""
    import onnx.defs
    import onnx.helper

    OpSchema = onnx.defs.OpSchema

    def parameter(value: Value) -> onnx.defs.OpSchema.FormalParameter:
        option = OpSchema.FormalParameterOption.Optional if value.optional else OpSchema.FormalParameterOption.Single
        return OpSchema.FormalParameter(value.name, value.type, value.doc, param_option=option)

    def attribute(value: Attribute) -> onnx.defs.OpSchema.Attribute:
        if value.default is not None:
            default = onnx.helper.make_attribute(value.name, value.default)
            return OpSchema.Attribute(value.name, default, value.doc)
        kind = getattr(OpSchema.AttrType, value.kind.name)
        return OpSchema.Attribute(value.name, kind, value.doc, required=value.required)

    statistics = [name for name in operator.types if name in S_TYPES]
    constraints = [
        ("T", [f"tensor({name})" for name in operator.types], "Type of the data."),
        ("S", [f"tensor({name})" for name in statistics], "Type of the statistics: float, or double for double data."),
    ]
    used = {value.type for value in (*operator.inputs, *operator.outputs)}
    return OpSchema(
        operator.name,
        operator.domain,
        operator.version,
        operator.doc,
        inputs=[parameter(value) for value in operator.inputs],
        outputs=[parameter(value) for value in operator.outputs],
        type_constraints=[constraint for constraint in constraints if constraint[0] in used],
        attributes=[attribute(value) for value in operator.attributes],
    )
