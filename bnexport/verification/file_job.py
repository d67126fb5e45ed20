"""The verifying process: two models that are files to it, run on the same inputs and judged.

Its parent survives if it crashes or fills the memory. It is started by `process`, talks over one end of a
`multiprocessing.Pipe`, and ends when the other end closes or after a minute without work. A request brings descriptors of the
files that hold the models, opened and checked by the parent, so this process opens no model file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from typing import Any

import ml_dtypes  # noqa: F401 - NumPy learns the names of its types
import numpy as np

from bnexport.errors import BnexportError, UnsupportedModelError
from bnexport.model_io import limits
from bnexport.native.library import ENVIRONMENT_VARIABLE
from bnexport.runtime import engine
from bnexport.runtime.engine import ENGINES, Engine, Serialised
from bnexport.verification import oracle
from bnexport.verification.comparison import compare_output
from bnexport.verification.inputs import FeedGroup, Feeds
from bnexport.verification.judge import Rules, judge
from bnexport.verification.probing import Tail
from bnexport.verification.process import IDLE_SECONDS, receive, send, send_arrays
from bnexport.verification.verdict import Verification


def main(handle: str) -> None:
    """Serves requests until the parent closes its end. handle: of this end of the pipe."""
    # The parent is still reading the models: wait for its first job.
    with contextlib.suppress(ImportError):
        importlib.import_module("onnxruntime")
    channel = getattr(connection, "PipeConnection", connection.Connection)(int(handle))
    while channel.poll(IDLE_SECONDS):
        try:
            request, descriptors = receive(channel)
        except EOFError:
            return
        try:
            result, arrays = FileJob(request, descriptors, lambda message: send(channel, message)).run()
        finally:
            for each in descriptors:
                os.close(each)
        send(channel, {"result": result})
        send_arrays(channel, arrays)


# The fields of a Verification that this process knows.
_FIELDS = ("status", "reason", "outputs", "engine", "samples", "input_scale", "sizes", "another")


class FileJob:
    """A request, and the descriptors of its files. report: sends a message to the parent."""

    def __init__(
        self, request: dict[str, Any], descriptors: Sequence[int], report: Callable[[dict[str, Any]], None]
    ) -> None:
        self._request, self._descriptors, self._report = request, descriptors, report

    def run(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Return what is asked for: values of one model, or the fields of a Verification and its witness."""
        return self._values() if "values" in self._request else self._comparison()

    def _values(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Run one model, in the first engine that can."""
        request, reasons = self._request, []
        model, feeds = self._model(request["model"]), {each["name"]: self._array(each) for each in request["inputs"]}
        for name in ENGINES[:1] if request["providers"] else ENGINES:
            try:
                values = engine.open_as_written(model, request["providers"], name).run(feeds, request["values"])
                if any(isinstance(value, (list, dict)) for value in values):
                    raise UnsupportedModelError("an output is a sequence or a map")
                return {"engine": engine.label(name)}, list(map(np.asarray, values))
            except BnexportError as error:
                reasons.append(str(error))
        return {"reason": "; ".join(reasons)}, []

    def _comparison(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        request = self._request
        self._models = {which: self._model(request[which]) for which in ("reference", "candidate")}
        self._precise = oracle.PreciseModel(self._models["reference"], request["patience"])
        self._rules = Rules(
            **{name: request[name] for name in ("outputs", "working", "atol", "rtol", "probes", "parted", "meetings")},
            may_be_empty=request["empty"] and not request["given"],
            tail=lambda start, output: Tail(self._models["reference"], start, output),
        )
        reasons = []
        # Only ONNX Runtime has providers.
        for name in ENGINES[:1] if request["providers"] else ENGINES:
            try:
                found = self._run(name)
                verdict, witness = dataclasses.asdict(dataclasses.replace(found, witness={})), found.witness
                fields = {field: verdict[field] for field in _FIELDS}
                return {**fields, "witness": list(witness)}, list(map(np.asarray, witness.values()))
            except BnexportError as error:
                reasons.append(str(error))
        return {"status": "not_verified", "reason": "; ".join(reasons)}, []

    def _run(self, name: str) -> Verification:
        """Return the verdict in one engine. Raises BnexportError where it does not run what is right."""
        # What no stock runtime has is run by its definition.
        engines = {"reference": ENGINES[1] if self._request["standardised"] else name, "candidate": name}
        turns = _Turns(engines, self._models, self._request["providers"], self._report)
        reference, candidate = (_Side(turns, which, self._precise) for which in self._models)
        turns.take("reference")
        names, nbytes = self._rules.names("reference"), self._models["reference"].nbytes
        groups = Feeds(self._request, reference, names, nbytes, self._array).run()
        try:
            verdict = judge(reference, candidate, groups, self._rules)
        except BnexportError as error:
            if self._models["candidate"].needs_library or name != ENGINES[0]:
                raise
            return Verification("failed", str(error), engine=name, witness=candidate.fed)
        label = engine.label(name) + "".join(f" ({provider})" for provider in self._request["providers"][:1])
        if verdict.status == "failed" and self._is_random(turns, reference, groups[0], self._rules.shown):
            return Verification("not_verified", "the model draws random numbers", engine=label)
        if verdict.another and self._is_random(turns, reference, groups[0], self._rules.names("reference")):
            verdict = dataclasses.replace(verdict, another="")
        # Two engines that agree need no third opinion.
        doubtful = ("passed", "failed") if name != ENGINES[0] else ("failed",)
        if engines["reference"] != ENGINES[0] and verdict.status in doubtful:
            doubt = oracle.find_doubt_alone(self._models["reference"], groups[0].inputs[0])
            if doubt:
                verdict = dataclasses.replace(verdict, status="not_verified", reason=doubt)
        return dataclasses.replace(verdict, engine=label)

    def _is_random(self, turns: _Turns, reference: Engine, group: FeedGroup, names: Sequence[str]) -> bool:
        """Whether a second session of the reference, which draws other random numbers, differs from the first.

        names: the first ones of the values that were compared.
        """
        engine.reseed()
        turns.close()
        try:
            again = reference.run(group.inputs[0], names)
        except BnexportError:
            return False
        pairs = zip(group.expected[0], again, strict=False)
        return any(compare_output("", [one], [two], self._rules.working).failed for one, two in pairs)

    def _model(self, fields: dict[str, Any]) -> Serialised:
        data = limits.pread(self._descriptors[0], fields["data"][1], fields["data"][0])
        weights = {entry["name"]: self._mapped(entry) for entry in fields["weights"]}
        if fields["library"] is not None:
            os.environ[ENVIRONMENT_VARIABLE] = fields["library"]
        return Serialised(data, weights, fields["library"], fields["no_library"], fields["training"])

    def _mapped(self, entry: dict[str, Any]) -> np.ndarray:
        """Map a tensor where it lies in its file."""
        shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"]).newbyteorder("<")
        if 0 in shape:
            return np.zeros(shape, dtype)
        with os.fdopen(os.dup(self._descriptors[entry["file"]]), "rb") as file:
            return np.asarray(np.memmap(file, dtype, "c", entry["offset"], shape))

    def _array(self, entry: dict[str, Any]) -> np.ndarray:
        return np.asarray(entry["text"], dtype=object) if "text" in entry else np.array(self._mapped(entry))


class _Turns:
    """The models of a request, each in its engine. One of them is open at a time; the parent is told what is being done, in case
    nothing else is heard of it.
    """

    def __init__(
        self,
        engines: Mapping[str, str],
        models: Mapping[str, Serialised],
        providers: Sequence[str],
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self.engines, self._models, self._providers, self._send = engines, models, providers, report
        self._open: dict[str, Engine] = {}

    def report(self, stage: str) -> None:
        self._send({"stage": stage, "engine": self.engines["candidate"]})

    def take(self, which: str) -> Engine:
        """Return the model, opened if it is not. Raises BnexportError."""
        self.report(which)
        if which not in self._open:
            self.close()
            providers = self._providers if which == "candidate" else ()
            self._open[which] = engine.open_as_written(self._models[which], providers, self.engines[which])
        return self._open[which]

    def close(self) -> None:
        self._open.clear()


class _Side:
    """The "reference" or the "candidate" as an engine, and in float64. What comes behind its runs is comparison.

    fed: the inputs of its last run.
    """

    def __init__(self, turns: _Turns, which: str, precise: oracle.PreciseModel) -> None:
        self.name, self._turns, self._which, self.exact = turns.engines[which], turns, which, precise.run
        self.fed: Mapping[str, Any] = {}

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str]) -> list[Any]:
        self.fed = feeds
        values = self._turns.take(self._which).run(feeds, outputs)
        self._turns.report("comparison")
        return values
