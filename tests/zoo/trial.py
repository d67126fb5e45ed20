"""One model of the zoo through every way out.

Rewrites the JSON object of its row after each stage, so that a stage that kills the process shows what was reached.
Errors are the largest difference from the untouched model over the largest value of that output.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import importlib
import json
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn
from torch.utils import _pytree

import bnexport
from bnexport.errors import BnexportError, first_line
from tests.frameworks import stand_ins
from tests.zoo import building, catalogue

EXPORTERS = ("dynamo", "torchscript")
# What `export` calls a format, by its suffix.
FORMATS = {"pt": "torchscript", "pt2": "pt2"}
# A larger error is compared with that of the untouched model in float32.
BOUND = 1e-4
OWN_ERRORS = 8.0
# Of processor time. A way that takes longer is stopped; others of the model still run.
SECONDS_OF_A_WAY = 200
# Of a model.
SECONDS = 1500
LIBRARIES = (
    "timm",
    "torchvision",
    "segmentation_models_pytorch",
    "transformers",
    "mmseg.models",
    "mmdet.models",
    "mmpretrain.models",
    "ultralytics.nn.tasks",
)


class Stopped(BaseException):
    """The time of a way is over. Not an Exception, so that no exporter catches it."""


class Trial:
    """The stages of one entry, collected in `result`."""

    def __init__(self, entry: catalogue.Entry, place: Path, names: Sequence[str] = ()) -> None:
        """names: of the ways to go; all where none is given."""
        self.entry, self.place, self.names = entry, place, names
        self.result: dict[str, Any] = {"name": entry.name, "shape": entry.shape, "ways": {}}
        self.expected: dict[tuple[int, ...], tuple[torch.Tensor, list[np.ndarray], float]] = {}

    def save(self) -> None:
        self.place.write_text(json.dumps(self.result))

    def run(self) -> None:
        pair = building.make(self.entry)
        self.result["batch_norms"] = pair.batch_norms
        self.result["parameters"] = sum(value.numel() for value in pair.plain.parameters())
        for shape in (self.entry.shape, *self.entry.others):
            self._remember(pair.plain, shape)
        if self.entry.shape not in self.expected:
            raise SystemExit(f"{self.entry.name} does not run on {self.entry.shape}: {self.result.get('does_not_run')}")
        if self.entry.conversion == "torch" and (changed := self._changed(pair.sync)) > BOUND:
            self.result["changed_by_conversion"] = float(f"{changed:.3g}")
            for shape in list(self.expected):
                self._remember(pair.sync, shape)
        self.save()
        example = self.expected[self.entry.shape][0]
        with tempfile.TemporaryDirectory() as folder:
            for exporter in EXPORTERS:
                for name, function in (("deploy", self._deploy), ("plain", self._plain), ("kept", self._kept)):
                    self._way(f"{name} {exporter}", function, pair.sync, example, Path(folder), exporter)
            for format in FORMATS:
                self._way(f"deploy .{format}", self._module_file, pair.sync, example, Path(folder), format)
        self.result["finished"] = True
        self.save()

    def _changed(self, converted: nn.Module) -> float:
        """The error of the converted model: torch's conversion drops what a subclass of batch norm does besides."""
        x, expected, _ = self.expected[self.entry.shape]
        with torch.no_grad():
            return _error(_flat(converted(x)), expected)

    def _remember(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        """The outputs of the reference, and its own error there, in the units of errors."""
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        try:
            with torch.no_grad():
                expected = _flat(model(x))
        except Exception as error:
            self.result.setdefault("does_not_run", {})[str(shape)] = first_line(error)[:200]
            return
        self.expected[shape] = (x, expected, _own_error(model, x, expected))

    def _way(self, name: str, function: Callable[..., dict[str, Any]], model: nn.Module, *arguments: Any) -> None:
        """Goes one way with a copy of the model, for some keep what an earlier trace left in them."""
        if self.names and name not in self.names:
            return
        begin, way = time.perf_counter(), {}
        try:
            with limited(SECONDS_OF_A_WAY):
                way = function(_fresh(model), *arguments)
        except BnexportError as error:
            way = {"status": "refused", "error": f"{type(error).__name__}: {str(error)[:1200]}"}
        except Exception as error:
            way = {"status": "failed", "error": f"{type(error).__name__}: {first_line(error)[:1200]}"}
        except Stopped:
            way = {"status": "stopped", "error": f"not done after {SECONDS_OF_A_WAY} s of processor time"}
        way["total_seconds"] = round(time.perf_counter() - begin, 2)
        self.result["ways"][name] = way
        self.save()

    def _deploy(self, model: nn.Module, x: torch.Tensor, folder: Path, exporter: str) -> dict[str, Any]:
        path = folder / f"deploy_{exporter}.onnx"
        begin = time.perf_counter()
        result = bnexport.export(model, x, path, exporter=exporter)
        seconds = time.perf_counter() - begin
        report = result.report
        restated = self._restated(path, folder / f"restated_{exporter}.onnx") if report.after.batch_norm else {}
        return {
            **_described(path, seconds),
            **self._judged(path),
            **restated,
            "notes": [note[:300] for note in result.notes],
            "verification": result.verification.status,
            "kept": [[site.outcome, site.op_type, site.reason[:300]] for site in report.kept][:40],
            "batch_norms_kept": report.after.batch_norm,
        }

    def _module_file(self, model: nn.Module, x: torch.Tensor, folder: Path, format: str) -> dict[str, Any]:
        path = folder / f"deploy.{format}"
        begin = time.perf_counter()
        result = bnexport.export(model, x, path, format=FORMATS[format], verify=False)  # compared here
        seconds = time.perf_counter() - begin
        load = torch.export.load(str(path)).module() if format == "pt2" else torch.jit.load(str(path))
        status, errors = "right", {}
        for shape, (feed, expected, own) in self.expected.items():
            if result.exporter == "trace" and shape != self.entry.shape:
                continue
            with torch.no_grad(), contextlib.suppress(Exception):  # a program is for some sizes
                errors[str(shape)] = error = _error(_flat(load(feed)), expected)
                status = status if error <= max(BOUND, OWN_ERRORS * own) else "wrong"
        report = result.report  # None where nothing can be folded
        kept = [] if report is None else [[site.outcome, site.op_type, site.reason[:300]] for site in report.kept][:40]
        return {
            "status": status if errors else "fails",
            "errors": {shape: float(f"{error:.3g}") for shape, error in errors.items()},
            "seconds": round(seconds, 2),
            "kept": kept or [["kept", "", note] for note in result.notes if "nothing was folded" in note],
            "batch_norm_nodes": self.result["batch_norms"] if report is None else report.after.batch_norm,
        }

    def _restated(self, path: Path, target: Path) -> dict[str, Any]:
        """The same file with a depthwise 1x1 Conv for each batch norm that is left."""
        verification = bnexport.fold(path, target, leftover="conv").report.verification
        proved = sum(site.method == "proved" for site in verification.sites)
        verdict = {"verification": verification.status, "proved": proved, "sites": len(verification.sites)}
        return {"restated": {**_described(target, 0.0), **self._judged(target), **verdict}}

    def _kept(self, model: nn.Module, x: torch.Tensor, folder: Path, exporter: str) -> dict[str, Any]:
        path, folded = folder / f"kept_{exporter}.onnx", folder / f"folded_{exporter}.onnx"
        begin = time.perf_counter()
        result = bnexport.export(model, x, path, exporter=exporter, mode="custom_op")
        seconds = time.perf_counter() - begin
        way = {**_described(path, seconds), **self._judged(path), "verification": result.verification.status}
        way["notes"] = [note[:300] for note in result.notes]
        done = bnexport.fold(path, folded)
        status = "none" if done.report.verification is None else done.report.verification.status
        return way | {"fold": {**_described(folded, 0.0), **self._judged(folded), "verification": status}}

    def _plain(self, model: nn.Module, x: torch.Tensor, folder: Path, exporter: str) -> dict[str, Any]:
        path, way = folder / f"plain_{exporter}.onnx", {}
        axes = {0: "batch"} | {axis: f"size{axis}" for axis in range(2, x.dim())}
        for dynamic in (True, False):
            begin = time.perf_counter()
            try:
                if exporter == "dynamo":
                    shapes = (dict.fromkeys(axes, torch.export.Dim.DYNAMIC),) if dynamic else None
                    torch.onnx.export(
                        model, (x,), path, dynamo=True, dynamic_shapes=shapes, opset_version=18, verbose=False
                    )
                else:
                    torch.onnx.export(
                        model,
                        (x,),
                        path,
                        dynamo=False,
                        input_names=["x"],
                        dynamic_axes={"x": axes} if dynamic else None,
                        opset_version=18,
                    )
            except Exception as error:
                way = {"status": "failed", "error": f"{type(error).__name__}: {first_line(error)[:300]}"}
                continue
            return {**_described(path, time.perf_counter() - begin), **self._judged(path), "dynamic": dynamic}
        return way

    def _judged(self, path: Path) -> dict[str, Any]:
        """status: right, wrong, or fails where the file declares a size that it cannot run."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        bnexport.register(options)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        (declared,) = [value.shape for value in session.get_inputs()]
        name, errors, status = session.get_inputs()[0].name, {}, "right"
        for shape, (x, expected, own) in self.expected.items():
            if any(isinstance(fixed, int) and fixed != size for fixed, size in zip(declared, shape)):
                continue
            try:
                got = session.run(None, {name: x.numpy()})
            except Exception as error:
                errors[str(shape)] = first_line(error)[-300:]
                status = "fails" if status == "right" else status
                continue
            error = _error(got, expected)
            errors[str(shape)] = float(f"{error:.3g}")
            if not error <= max(BOUND, OWN_ERRORS * own):
                status = "wrong"
        fixed = [axis for axis, size in enumerate(declared) if isinstance(size, int) and axis != 1]
        return {"status": status, "errors": errors, "fixed": fixed}


def run(name: str, place: Path, ways: Sequence[str]) -> None:
    Trial(catalogue.find(name), place, ways).run()


def warm() -> None:
    """Import the libraries, and export once: what both exporters set up then is in every fork."""
    import_libraries()
    with tempfile.TemporaryDirectory() as folder:
        for exporter in EXPORTERS:
            net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
            path = Path(folder, f"{exporter}.onnx")
            bnexport.export(net, torch.randn(2, 3, 8, 8), path, exporter=exporter, verify=False)


def import_libraries() -> None:
    torch.set_num_threads(1)
    stand_ins.install()
    for package in LIBRARIES:
        importlib.import_module(package)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Stopped after that much processor time; what is printed goes to stderr, warnings nowhere."""
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _stop(*_: Any) -> None:
    raise Stopped


def _fresh(model: nn.Module) -> nn.Module:
    """A copy, or the model itself where it holds a process group, which cannot be copied."""
    try:
        return copy.deepcopy(model)
    except Exception:
        return model


def _flat(value: Any) -> list[np.ndarray]:
    leaves = _pytree.tree_leaves(dict(value) if isinstance(value, collections.abc.Mapping) else value)
    return [leaf.detach().numpy().copy() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _error(got: list[Any], expected: list[np.ndarray]) -> float:
    """The largest error of an output; infinite where shapes, numbers or places of NaN differ."""
    if len(got) != len(expected) or any(one.shape != other.shape for one, other in zip(got, expected)):
        return float("inf")
    return max((_difference(one, other) for one, other in zip(got, expected)), default=0.0)


def _difference(got: np.ndarray, expected: np.ndarray) -> float:
    if expected.dtype.kind != "f":
        return float((got != expected).mean()) if got.size else 0.0
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(got)) or not finite.any():
        return float("inf") if expected.size else 0.0
    scale = np.abs(expected[finite]).max()
    return float(np.abs(got.astype(np.float64) - expected)[finite].max() / max(scale, 1e-30))


def _own_error(model: nn.Module, x: torch.Tensor, expected: list[np.ndarray]) -> float:
    """The error of the untouched model in float32, measured from float64; 0 where it does not run in float64."""
    try:
        with torch.no_grad():
            exact = _flat(model.double()(x.double()))
        return _error(expected, exact)
    except Exception:
        return 0.0
    finally:
        model.float()


def _described(path: Path, seconds: float) -> dict[str, Any]:
    counts = collections.Counter(node.op_type for node in _nodes(onnx.load(path, load_external_data=False).graph))
    return {
        "seconds": round(seconds, 2),
        "nodes": sum(counts.values()),
        "batch_norm_nodes": counts["BatchNormalization"],
        "sync_nodes": counts["MMCVSyncBatchNorm"],
    }


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from _nodes(attribute.g)
