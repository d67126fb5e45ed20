"""The public surface is what tests/public_api.txt says, all of it is documented, and the operators are what the contract says."""

from __future__ import annotations

import difflib
import inspect

import onnx
import onnx.helper
import pytest

from bnexport import schema
from docs import write_operator
from tests import public_api


def test_the_surface_is_the_reviewed_one() -> None:
    reviewed, now = public_api.FILE.read_text(), public_api.listing()
    difference = "".join(difflib.unified_diff(reviewed.splitlines(True), now.splitlines(True), "reviewed", "now", n=0))
    assert reviewed == now, (
        f"the public surface changed; if it was meant, run `python -m tests.public_api`\n{difference}"
    )


def test_every_public_name_has_a_docstring() -> None:
    inner = [
        (f"{name}.{member}", it)
        for name, value in public_api.objects()
        if inspect.isclass(value)
        for member, it, _ in public_api.members(value)
        if it is not None
    ]
    given = [(name, value) for name, value in public_api.objects() if callable(value)]
    assert [name for name, value in [*given, *inner] if not (inspect.getdoc(value) or "").strip()] == []


def test_a_changed_signature_is_seen() -> None:
    def before(x: int, *, y: str = "a") -> None: ...
    def after(x: int, *, y: str = "b") -> None: ...

    assert public_api.signature(before) == "(x: int, *, y: str = 'a') -> None"
    assert public_api.signature(after) != public_api.signature(before)


@pytest.mark.parametrize("operator", schema.OPERATORS, ids=lambda operator: operator.name)
def test_op_schema_says_what_the_contract_says(operator):
    made = schema.op_schema(operator)
    assert (made.name, made.domain, made.since_version) == (operator.name, "mmcv", 1)
    assert [value.name for value in made.inputs] == [value.name for value in operator.inputs]
    assert [value.name for value in made.outputs] == [value.name for value in operator.outputs]
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    assert [value.option == optional for value in made.inputs] == [value.optional for value in operator.inputs]
    assert set(made.attributes) == {attribute.name for attribute in operator.attributes}
    for attribute in operator.attributes:
        default = onnx.helper.get_attribute_value(made.attributes[attribute.name].default_value)
        expected = attribute.default.encode() if isinstance(attribute.default, str) else attribute.default
        assert default == pytest.approx(expected, rel=1e-7) if isinstance(expected, float) else default == expected


def test_gradient_outputs_are_aligned_with_the_forward_inputs():
    forward, gradient = schema.SYNC_BATCH_NORM, schema.SYNC_BATCH_NORM_GRAD
    assert len(gradient.outputs) == len(forward.inputs)
    for value, output in zip(forward.inputs, gradient.outputs):
        assert output.optional
        assert output.name in (f"grad_{value.name}", f"unused_{value.name}")


def test_the_documents_tables_are_the_contracts():
    text = write_operator.PAGE.read_text()
    assert write_operator.written(text) == text, "python -m docs.write_operator"


def test_functions_are_signed_and_annotated():
    """The oldest torch reads annotations, the others signatures."""

    def function(*arguments): ...

    signed = schema.TORCH_SYNC_BATCH_NORM.sign(function, "self")
    names = ["self", *(argument.name for argument in schema.TORCH_SYNC_BATCH_NORM.arguments)]
    parameters = inspect.signature(signed).parameters
    assert signed.__annotations__ == {name: parameter.annotation for name, parameter in parameters.items()}
    assert list(parameters) == names and parameters["self"].annotation is object


def test_lookups():
    operator = schema.SYNC_BATCH_NORM
    assert operator.attribute("eps").default == 1e-5
    with pytest.raises(KeyError, match="no attribute 'epsilon'"):
        operator.attribute("epsilon")
