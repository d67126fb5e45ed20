"""One model of the zoo through every way out.

Rewrites the JSON object of its row after each stage, so that a stage that kills the process shows what was reached.
Errors are the largest difference from the untouched model over the largest value of that output.
"""

import collections
import contextlib
import copy
import functools
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
# Of a model.
SECONDS = 1500
LIBRARIES = "timm torchvision segmentation_models_pytorch transformers mmseg.models mmdet.models mmpretrain.models ultralytics.nn.tasks"


class Stopped(BaseException):
    """The time of a way is over. Not an Exception, so that no exporter catches it."""


class Ways:
    """The ways of one case, collected in `result`."""

    # Of processor time. A way that takes longer is stopped; others of the case still run.
    seconds: float

    def __init__(self, place: Path, name: str, shape: tuple[int, ...], names: Sequence[str] = ()) -> None:
        """names: of the ways to go; all where none is given."""
        self.place, self.names = place, names
        self.result: dict[str, Any] = {"name": name, "shape": shape, "ways": {}}

    def save(self, **more: Any) -> None:
        self.result |= more
        self.place.write_text(json.dumps(self.result))

    def go(self, name: str, way: Callable[[Path], dict[str, Any]]) -> None:
        """Go one way, in a folder of its own."""
        if self.names and name not in self.names:
            return
        begin = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            try:
                with limited(self.seconds):
                    found = way(Path(folder))
            except BnexportError as error:
                said = str(error).replace(f"{folder}/", "")
                found = {"status": "refused", "error": f"{type(error).__name__}: {said[:1200]}"}
            except Exception as error:
                found = {"status": "failed", "error": f"{type(error).__name__}: {first_line(error)[:1200]}"}
            except Stopped:
                found = {"status": "stopped", "error": f"not done after {self.seconds} s of processor time"}
        self.result["ways"][name] = found | {"total_seconds": round(time.process_time() - begin, 1)}
        self.save()


class Trial(Ways):
    """One model of the zoo through every way out."""

    seconds = 200

    def __init__(self, entry: catalogue.Entry, place: Path, names: Sequence[str] = ()) -> None:
        super().__init__(place, entry.name, entry.shape, names)
        self.entry = entry
        self.expected: dict[tuple[int, ...], tuple[torch.Tensor, list[np.ndarray], float]] = {}

    def run(self) -> None:
        pair = building.make(self.entry)
        self.result["batch_norms"] = pair.batch_norms
        self.result["parameters"] = sum(value.numel() for value in pair.plain.parameters())
        self.remember(pair.plain)
        if self.entry.shape not in self.expected:
            raise SystemExit(f"{self.entry.name} does not run on {self.entry.shape}: {self.result.get('does_not_run')}")
        if self.entry.conversion == "torch" and (changed := self.changed(pair.sync)) > BOUND:
            self.result["changed_by_conversion"] = float(f"{changed:.3g}")
            self.remember(pair.sync)
        self.save()
        for exporter in EXPORTERS:
            for name, function in (("deploy", self.deploy), ("plain", self._plain), ("kept", self.kept)):
                self.go(f"{name} {exporter}", functools.partial(function, pair.sync, exporter))
        for format in FORMATS:
            self.go(f"deploy .{format}", functools.partial(self._module_file, pair.sync, format))
        self.save(finished=True)

    @property
    def example(self) -> torch.Tensor:
        return self.expected[self.entry.shape][0]

    def changed(self, converted: nn.Module) -> float:
        """The error of the converted model: torch's conversion drops what a subclass of batch norm does besides."""
        x, expected, _ = self.expected[self.entry.shape]
        with torch.no_grad():
            return _error(_flat(converted(x)), expected)

    def remember(self, model: nn.Module) -> None:
        """The outputs of the reference at each size, and its own error there, in the units of errors."""
        for shape in (self.entry.shape, *self.entry.others):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
            try:
                with torch.no_grad():
                    expected = _flat(model(x))
            except Exception as error:
                self.result.setdefault("does_not_run", {})[str(shape)] = first_line(error)[:200]
                continue
            self.expected[shape] = (x, expected, _own_error(model, x, expected))

    def deploy(self, model: nn.Module, exporter: str, folder: Path) -> dict[str, Any]:
        path = folder / "deploy.onnx"
        begin = time.perf_counter()
        result = bnexport.export(_fresh(model), self.example, path, exporter=exporter)
        way = self._file(path, time.perf_counter() - begin)
        way |= self._restated(path, folder / "restated.onnx") if result.report.after.batch_norm else {}
        way |= {"notes": [note[:300] for note in result.notes], "verification": result.verification.status}
        return way | {"kept": _kept(result.report), "batch_norms_kept": result.report.after.batch_norm}

    def _module_file(self, model: nn.Module, format: str, folder: Path) -> dict[str, Any]:
        path = folder / f"deploy.{format}"
        begin = time.perf_counter()
        # Compared here.
        result = bnexport.export(_fresh(model), self.example, path, format=FORMATS[format], verify=False)
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
        kept = [] if report is None else _kept(report)
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
        return {"restated": {**self._file(target), **verdict}}

    def kept(self, model: nn.Module, exporter: str, folder: Path) -> dict[str, Any]:
        path, folded = folder / "kept.onnx", folder / "folded.onnx"
        begin = time.perf_counter()
        result = bnexport.export(_fresh(model), self.example, path, exporter=exporter, mode="custom_op")
        way = {**self._file(path, time.perf_counter() - begin), "verification": result.verification.status}
        way["notes"] = [note[:300] for note in result.notes]
        done = bnexport.fold(path, folded).report.verification
        return way | {"fold": {**self._file(folded), "verification": "none" if done is None else done.status}}

    def _plain(self, model: nn.Module, exporter: str, folder: Path) -> dict[str, Any]:
        """torch.onnx.export with dynamic sizes, and with static ones where it cannot make that."""
        path, way, x = folder / "plain.onnx", {}, self.example
        axes = {0: "batch"} | {axis: f"size{axis}" for axis in range(2, x.dim())}
        for dynamic in (True, False):
            begin = time.perf_counter()
            if exporter == "dynamo":
                sizes = (dict.fromkeys(axes, torch.export.Dim.DYNAMIC),) if dynamic else None
                options = {"dynamo": True, "dynamic_shapes": sizes, "verbose": False}
            else:
                options = {"dynamo": False, "input_names": ["x"], "dynamic_axes": {"x": axes} if dynamic else None}
            try:
                torch.onnx.export(_fresh(model), (x,), path, opset_version=18, **options)
            except Exception as error:
                way = {"status": "failed", "error": f"{type(error).__name__}: {first_line(error)[:300]}"}
                continue
            return {**self._file(path, time.perf_counter() - begin), "dynamic": dynamic}
        return way

    def _file(self, path: Path, seconds: float = 0.0) -> dict[str, Any]:
        """What a file is made of, and how it was judged."""
        counts = collections.Counter(node.op_type for node in _nodes(onnx.load(path, load_external_data=False).graph))
        return {
            "seconds": round(seconds, 2),
            "nodes": sum(counts.values()),
            "batch_norm_nodes": counts["BatchNormalization"],
            "sync_nodes": counts["MMCVSyncBatchNorm"],
            **self.judged(path),
        }

    def judged(self, path: Path) -> dict[str, Any]:
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
    for package in LIBRARIES.split():
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


def _kept(report: Any) -> list[list[str]]:
    return [[site.outcome, site.op_type, site.reason[:300]] for site in report.kept][:40]


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


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from _nodes(attribute.g)
