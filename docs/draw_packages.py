"""Draws docs/design/packages.svg: the packages of bnexport and their imports, read from the source.

    python -m docs.draw_packages

An arrow stands for imports of one package by another; those that follow from others are left out. The levels are
those that tests/test_architecture.py holds. Colours are chosen to be read on white and on black.
"""

from __future__ import annotations

import ast
import html
from pathlib import Path

from tests.test_architecture import LEVELS, ORDER, PACKAGE, edges, level_of

PICTURE = Path(__file__).parent / "design" / "packages.svg"
WIDTH, BOX, HEIGHT, ROW, GAP = 760, 340, 52, 92, 32  # pixels
INK, SOFT, LINE, FILL = "#1b1b1b", "#5b6470", "#8a919c", "#d7e3f4"


def imports() -> dict[str, set[str]]:
    """The packages that each package imports, without those that follow from others."""
    direct: dict[str, set[str]] = {name: set() for name in LEVELS if not name.startswith("__")}
    for edge in edges(PACKAGE):
        source, target = level_of(edge.source)[1], level_of(edge.target)[1]
        if source != target and source in direct and target in direct:
            direct[source].add(target)

    def reached(name: str) -> set[str]:
        return direct[name].union(*(reached(target) for target in direct[name] if LEVELS[target] < LEVELS[name]))

    return {
        name: {target for target in targets if not any(target in reached(other) for other in targets - {target})}
        for name, targets in direct.items()
    }


def purpose(name: str) -> str:
    """The first line of a package's docstring."""
    path = PACKAGE / name / "__init__.py" if (PACKAGE / name).is_dir() else PACKAGE / f"{name}.py"
    line = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
    return line.rstrip(".")


def picture() -> str:
    """The SVG file."""
    rows = [[name for name in names if not name.startswith("__")] for names in ORDER]
    rows = [row for row in rows if row]
    places: dict[str, tuple[float, float, float]] = {}  # left, top, width
    for number, row in enumerate(reversed(rows)):
        width = min(BOX, (WIDTH - GAP * (len(row) + 1)) / len(row))
        left = (WIDTH - width * len(row) - GAP * (len(row) - 1)) / 2
        for index, name in enumerate(row):
            places[name] = (left + index * (width + GAP), GAP + number * ROW, width)
    parts = []
    for source, targets in imports().items():
        left, top, width = places[source]
        for index, target in enumerate(sorted(targets, key=lambda name: places[name])):
            other_left, other_top, other_width = places[target]
            if LEVELS[source] == LEVELS[target]:
                continue
            x = left + width * (index + 1) / (len(targets) + 1)
            end = other_left + other_width / 2
            bottom = top + HEIGHT
            bend = (other_top - bottom) / 2
            parts.append(
                f'<path d="M{x:.0f} {bottom:.0f} C{x:.0f} {bottom + bend:.0f} {end:.0f} {other_top - bend:.0f} '
                f'{end:.0f} {other_top - 5:.0f}" fill="none" stroke="{LINE}" stroke-width="1.5" marker-end="url(#end)"/>'
            )
    for name, (left, top, width) in places.items():
        middle = left + width / 2
        parts.append(
            f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{HEIGHT}" rx="6" fill="{FILL}"/>'
            f'<text x="{middle:.0f}" y="{top + 21:.0f}" font-size="14" font-weight="600" fill="{INK}">{name}</text>'
            f'<text x="{middle:.0f}" y="{top + 39:.0f}" font-size="10.5" fill="{SOFT}">{_fitted(purpose(name), width)}</text>'
        )
    height = 2 * GAP + ROW * (len(rows) - 1) + HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'text-anchor="middle">\n<title>The packages of bnexport and their imports</title>\n'
        '<defs><marker id="end" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _fitted(text: str, width: float) -> str:
    """The words that fit into a box."""
    most = int(width / 5.4)
    if len(text) > most:
        text = text.partition(":")[0]
    if len(text) > most:
        text = text[: most - 3].rsplit(" ", 1)[0] + " ..."
    return html.escape(text)


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(f"wrote {PICTURE}")
