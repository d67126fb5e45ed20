"""A pytest plugin: what each test's calls of the public functions return or raise, and what its programs print.

Every public function is wrapped wherever a module has it by name. Kept: verdicts, marks, sizes and bounds; what was folded
by which rule, what stayed and why; operators and a digest of the weights of each model; messages of errors, notes and
warnings; exit codes and texts of programs; the keys of what they print as JSON. Left out: numbers that timing or rounding
changes. Folders and addresses are written as <...>.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

FUNCTIONS = (
    *("fold", "verify", "inspect", "inline", "export", "fold_module", "export_training_step", "load_checkpoint"),
    *("convert_sync_batchnorm", "revert_sync_batchnorm"),
)
FOLDER = "BNEXPORT_RECORD"
_UNSTABLE = frozenset(
    ("max_abs_diff", "max_rel_diff", "error", "bound", "seconds", "elements", "atol", "rtol", "engine")
)
_NAMES = (
    (re.compile(r"(/[\w.+-]+)*/pytest-of-[\w-]+/pytest-\d+[\w./-]*"), "<folder>"),
    (re.compile(r"/(tmp|var/tmp)/[\w./-]+"), "<folder>"),
    (re.compile(r"0x[0-9a-f]{6,}"), "<address>"),
    (re.compile(r"\b\d+(\.\d+)?(e[+-]?\d+)? ?(s|ms|us|MB|GB|KB)\b"), "<figure>"),
    (re.compile(r"\d+\.\d+(e[+-]?\d+)?|\d+e[+-]?\d+"), "<number>"),
)


class Record:
    """Events of each test, and its seconds."""

    def __init__(self) -> None:
        self.events: dict[str, list[Any]] = {}
        self.seconds: dict[str, float] = {}
        self.test = ""
        self._depth = 0

    def add(self, event: dict[str, Any]) -> None:
        if self.test:
            self.events.setdefault(self.test, []).append(event)

    @contextlib.contextmanager
    def outermost(self) -> Iterator[bool]:
        """Whether this call is the test's own, and not one of another recorded function's."""
        self._depth += 1
        try:
            yield self._depth == 1
        finally:
            self._depth -= 1


RECORD = Record()


def pytest_collection_finish() -> None:
    """Replaces each public function in every module that has it; the tests have been imported."""
    import bnexport
    from tests.support import warm

    for name in FUNCTIONS:
        original = getattr(bnexport, name)
        _replace(original, _wrapped(name, original))
    _replace(warm.run, _program(warm.run))


def _replace(original: Callable[..., Any], wrapper: Callable[..., Any]) -> None:
    for module in tuple(sys.modules.values()):
        for name, value in tuple(vars(module).items()) if hasattr(module, "__dict__") else ():
            if value is original:
                setattr(module, name, wrapper)


def _wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with RECORD.outermost() as is_own:
            try:
                result = original(*args, **kwargs)
            except Exception as error:
                if is_own:
                    RECORD.add({"function": name, "raises": type(error).__name__, "message": text(str(error))})
                raise
            if is_own:
                RECORD.add({"function": name, **described(result)})
            return result

    return call


def _program(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        done = original(*args, **kwargs)
        event = {
            "program": text(" ".join(map(str, args[:6]))),
            "exit": done.returncode,
            "errors": text(done.stderr or ""),
        }
        try:
            event["keys"] = keys(json.loads(done.stdout))
        except (ValueError, TypeError):
            event["prints"] = text(done.stdout or "")
        RECORD.add(event)
        return done

    return call


def text(message: str) -> str:
    """Return a message without folders, addresses and measured numbers."""
    for pattern, name in _NAMES:
        message = pattern.sub(name, message)
    return message[:4000]


def keys(data: Any) -> Any:
    """Return the keys of JSON data, one element of a list standing for all."""
    if isinstance(data, dict):
        return {name: keys(value) for name, value in sorted(data.items())}
    return [keys(data[0])] if isinstance(data, list) and data else type(data).__name__


def described(result: Any) -> dict[str, Any]:
    """Return what is worth comparing of a public function's result."""
    found: dict[str, Any] = {"returns": type(result).__name__}
    for name in ("report", "verification"):
        value = getattr(result, name, None)
        if value is not None and hasattr(value, "to_dict"):
            found[name] = stable(value.to_dict())
    if hasattr(result, "to_dict"):
        found["result"] = stable(result.to_dict())
    if hasattr(result, "notes"):
        found["notes"] = [text(str(note)) for note in result.notes]
    model = getattr(result, "model", None)
    if model is not None:
        with contextlib.suppress(Exception):  # a torch module, or a model whose files are gone
            found["model"] = digest(model)
    return found


def stable(data: Any) -> Any:
    """Return JSON data without numbers that change from run to run."""
    if isinstance(data, dict):
        return {name: stable(value) for name, value in data.items() if name not in _UNSTABLE}
    if isinstance(data, list | tuple):
        return [stable(value) for value in data]
    if isinstance(data, float):
        return float(f"{data:.3g}")
    return text(data) if isinstance(data, str) else data


def digest(model: Any) -> dict[str, Any]:
    """Return the operators of a model in order, and a digest of its weights by name."""
    from bnexport.model_io import to_proto

    proto = model if isinstance(model, onnx.ModelProto) else to_proto(model)
    weights = hashlib.sha256()
    for tensor in sorted(proto.graph.initializer, key=lambda tensor: tensor.name):
        weights.update(tensor.name.encode())
        weights.update(np.ascontiguousarray(onnx.numpy_helper.to_array(tensor)).tobytes())
    operators = " ".join(node.op_type for node in proto.graph.node)
    return {"operators": operators[:2000], "nodes": len(proto.graph.node), "weights": weights.hexdigest()[:16]}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    RECORD.test = item.nodeid
    try:
        return (yield)
    finally:
        RECORD.test = ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    report: pytest.TestReport = yield
    if report.when == "call":
        RECORD.seconds[item.nodeid] = round(report.duration, 2)
        if report.failed:
            RECORD.add({"test": "failed"})
    return report


def pytest_sessionfinish() -> None:
    folder = os.environ.get(FOLDER)
    if folder and RECORD.events:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        path = Path(folder) / f"{worker}.json"
        path.write_text(json.dumps({"events": RECORD.events, "seconds": RECORD.seconds}, sort_keys=True, default=str))
