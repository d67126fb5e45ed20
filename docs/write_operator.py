"""Write the tables of the operators, which `bnexport.schema` states, into docs/operator.md.

python -m docs.write_operator
"""

from __future__ import annotations

from pathlib import Path

from bnexport.schema import OPERATORS, AttributeKind, Operator

PAGE = Path(__file__).parent / "operator.md"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->"


def tables(operator: Operator) -> str:
    """Return the tables of an operator."""
    lines = [f"### `{operator.name}` (domain `{operator.domain}`, version {operator.version})", "", operator.doc, ""]
    lines += ["| | name | type | shape | | meaning |", "|---|---|---|---|---|---|"]
    for direction, values in (("in", operator.inputs), ("out", operator.outputs)):
        for index, value in enumerate(values):
            need = "optional" if value.optional else "required"
            lines.append(
                f"| {direction} {index} | `{value.name}` | {value.type} | {value.shape} | {need} | {value.doc} |"
            )
    lines += ["", "| attribute | type | default | meaning |", "|---|---|---|---|"]
    for attribute in operator.attributes:
        default = f'"{attribute.default}"' if attribute.kind is AttributeKind.STRING else f"{attribute.default}"
        allowed = f" One of {', '.join(f'`{value}`' for value in attribute.allowed)}." if attribute.allowed else ""
        lines.append(f"| `{attribute.name}` | {attribute.kind.value} | `{default}` | {attribute.doc}{allowed} |")
    return "\n".join(lines) + "\n"


def written(text: str) -> str:
    """Return the page with its tables renewed."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n".join(tables(operator) for operator in OPERATORS) + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
