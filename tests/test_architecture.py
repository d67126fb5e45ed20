"""The import order of the packages, no circle of files, and one file that names what torch keeps private."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bnexport import torch_versions
from bnexport.errors import MissingPackageError

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "bnexport"
MOST_LINES, MOST_PARAMETERS = 80, 12
# Signatures that are given: the public API with its docstrings, the command line's options, an operator of torch.
LONG = {
    "cli/export.py: export",
    "cli/fold.py: fold",
    "cli/verify.py: verify",
    "exporting/against_file.py: verify",
    "cli/train.py: train",
    "cli/export.py: train_export",
    "exporting/api.py: export",
    "folding/api.py: fold",
    "training/api.py: export_training_step",
    "training/translations/convolution.py: convolution_backward",
}

# Each level may import those before it. Peers of one level do not import each other, the first level apart.
ORDER = (
    ("__init__", "errors", "interface", "pages", "schema", "startup", "tolerances", "torch_versions"),
    ("model_io", "native"),
    ("graph", "sync_bn"),
    ("modules", "runtime"),
    ("verification",),
    ("folding",),
    ("recalibration",),
    ("exporting",),
    ("training",),
    ("cli",),
    ("__main__",),
)
LEVELS = {name: level for level, names in enumerate(ORDER) for name in names}


class Edge(NamedTuple):
    """One import: the importing and the imported module, dotted, and the line."""

    source: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{path_of(self.source)}:{self.line} imports {path_of(self.target)}"


def path_of(module: str) -> str:
    path = PACKAGE.parent / module.replace(".", "/")
    return str((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).relative_to(PACKAGE.parent))


def modules(package: Path) -> dict[str, Path]:
    """The files of a package by their dotted names."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def edges(package: Path) -> list[Edge]:
    """Every import of a module of the package by another, lazy ones too; `if TYPE_CHECKING:` apart."""
    files = modules(package)
    return [
        Edge(module, name, node.lineno)
        for module, path in files.items()
        for node in _imports(ast.parse(path.read_text()))
        for name in _targets(node, files)
        if name != module
    ]


def _imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from _imports(other)
        else:
            yield from _imports(child)


def _targets(node: ast.Import | ast.ImportFrom, files: dict[str, Path]) -> Iterator[str]:
    root = next(iter(files))
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        assert node.level == 0, "relative imports hide where a name is from"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        if name.split(".")[0] == root:
            parts = name.split(".")
            yield next(found for end in range(len(parts), 0, -1) if (found := ".".join(parts[:end])) in files)


def level_of(module: str) -> tuple[int, str]:
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "__init__"
    return LEVELS[name], name


def test_packages_import_in_one_direction() -> None:
    wrong = []
    for edge in edges(PACKAGE):
        (source, package), (target, other) = level_of(edge.source), level_of(edge.target)
        if source < target or (source == target != 0 and package != other):
            wrong.append(f"{edge}: {other} does not come before {package}")
    assert wrong == []


def test_no_circle_of_files() -> None:
    """A package counts as its __init__.py."""
    order: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for edge in edges(PACKAGE):
        order.add(edge.source, edge.target)
    order.prepare()


def test_the_local_proof_shares_no_rule_with_the_folder() -> None:
    """Nor an edit or a search: an error there would be in both.

    Both read a graph with the same readers, since two readings disagreed more than once: its shapes, its constants, the
    mode of a batch norm, the results of nodes. Every form of these is compared with ONNX Runtime (tests/forms), and so are
    whole models.
    """
    allowed = {"errors", "schema", "tolerances", "model_io", "runtime"}
    readers = ("constants", "evaluate", "nodes", "shapes")
    read = tuple(f"bnexport.graph.{name}" for name in readers)
    wrong = [
        edge
        for edge in edges(PACKAGE)
        if edge.source.startswith("bnexport.verification.proof")
        and level_of(edge.target)[1] not in allowed
        and not edge.target.startswith(("bnexport.verification.proof", "bnexport.verification.verdict", *read))
    ]
    assert [str(edge) for edge in wrong] == []


def test_nodes_are_evaluated_in_one_place() -> None:
    """onnx.reference stands behind one file, and what runs whole models."""
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "onnx.reference import" in (text := path.read_text()) or "import onnx.reference" in text
    }
    assert users == {"graph/onnx_reference.py"}
    importers = {edge.source for edge in edges(PACKAGE) if edge.target == "bnexport.graph.onnx_reference"}
    assert not any(each.startswith(("bnexport.folding", "bnexport.verification.proof")) for each in importers)


def test_every_package_has_its_level() -> None:
    names = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir() if _is_python(path)}
    assert names == set(LEVELS)


def test_a_file_name_means_one_thing() -> None:
    names = [path.stem for path in PACKAGE.rglob("*.py")]
    assert {name for name in names if names.count(name) > 1} <= {"__init__", "api", "report"}


# What each room of custom_ops may include, itself apart. The public headers of include/ are open to all.
ROOMS = {
    "abi": set(),
    "schema": set(),
    "kernels/common": set(),
    "kernels/cpu": {"kernels/common"},
    "kernels/cuda": {"kernels/common"},
    "comm": set(),
    "capi": {"schema", "comm", "kernels/cpu", "kernels/cuda"},
    "adapters": {"abi", "schema", "comm", "kernels/common", "kernels/cpu"},
}


def room_of(path: Path) -> str | None:
    name = path.as_posix()
    return max((room for room in ROOMS if name.startswith(f"{room}/")), key=len, default=None)


def foreign_includes(top: Path) -> list[str]:
    """Includes of a room that may not be there, of tests, or between batch norm and training."""
    found = []
    for path in sorted(path for path in top.rglob("*") if path.suffix in (".h", ".cpp", ".cu")):
        own = path.relative_to(top)
        if own.parts[0] == "include":
            continue
        for name in re.findall(r'#include "([^"]+)"', path.read_text()):
            target = (path.parent / name).resolve()
            if not target.is_file():
                continue  # on the include path
            other = target.relative_to(top.resolve()) if target.is_relative_to(top.resolve()) else None
            if other is not None and other.parts[0] == "include":
                continue
            source, room = room_of(own), other and room_of(other)
            subjects = [{"batch_norm", "training"} & set(file.parts) for file in (own, other) if file is not None]
            if (
                room is None
                or (room != source and room not in ROOMS.get(str(source), ROOMS))
                or (source != "schema" and all(subjects) and subjects[0] != subjects[-1])
            ):
                found.append(f"{own} includes {name}")
    return found


def test_custom_ops_include_in_one_direction() -> None:
    assert foreign_includes(ROOT / "custom_ops") == []


def test_no_function_is_long() -> None:
    trees = {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    found = []
    for path, node in ((path, node) for path, tree in trees.items() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
            if (lines > MOST_LINES or count > MOST_PARAMETERS) and f"{path}: {node.name}" not in LONG:
                found.append(f"{path}: {node.name}: {lines} lines, {count} parameters")
    assert found == []


def _is_python(path: Path) -> bool:
    return path.suffix == ".py" or (path / "__init__.py").is_file()


# An argument of a torch operator and one of the command line; a custom operator and a linear one of a graph.
TWINS = {"Argument", "Operator"}


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for module, path in modules(PACKAGE).items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path_of(module)}:{node.lineno}")
    twins = {name: found for name, found in places.items() if len(found) > 1 and name not in TWINS}
    assert not twins, twins


# fresh_process_runner.py runs where bnexport cannot be imported.
MAY = {"torch_versions.py", "exporting/fresh_process_runner.py"}


def private_names(source: str) -> Iterator[str]:
    """Yield dotted names that begin at an import of torch and have a part with a leading underscore."""
    tree = ast.parse(source)
    roots = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    roots[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                roots[alias.asname or alias.name] = name = f"{node.module}.{alias.name}"
                yield name
    for node in ast.walk(tree):
        inner: ast.AST = node
        parts = []
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in roots:
            yield ".".join((roots[inner.id], *reversed(parts)))


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_one_file_names_what_is_private() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if str(path.relative_to(PACKAGE)) not in MAY
        for name in private_names(path.read_text())
        if is_private(name)
    ]
    assert found == []


PRIVATE = [
    *("import torch\ntorch._C._is_tracing()", "import torch._dynamo", "import torch._dynamo as dynamo"),
    *("from torch.utils import _pytree", "from torch._subclasses.fake_tensor import FakeTensorMode"),
    *(
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "import torch.distributed as dist\ndist._name",
    ),
    "def f():\n    import torch\n    return torch.onnx._internal.x",
]
PUBLIC = "import torch\nfrom torch.export import Dim\ntorch.__version__\nself._buffers\nDim.AUTO"


def test_a_private_name_is_found() -> None:
    assert [source for source in (*PRIVATE, PUBLIC) if not any(map(is_private, private_names(source)))] == [PUBLIC]


def test_an_older_torch_is_refused_with_the_version_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_versions, "VERSION", (2, 4))
    monkeypatch.setattr(torch_versions.torch, "__version__", "2.4.1+cpu")
    torch_versions.require((2, 4), "this")
    with pytest.raises(MissingPackageError) as caught:
        torch_versions.require((2, 10), "a training step")
    assert str(caught.value) == ("a training step needs torch 2.10 or newer, got 2.4.1+cpu; pip install 'torch>=2.10'")
