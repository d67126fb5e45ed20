"""One file names what torch keeps private."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from bnexport import torch_versions
from bnexport.errors import MissingPackageError

PACKAGE = Path(__file__).parents[1] / "bnexport"
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
