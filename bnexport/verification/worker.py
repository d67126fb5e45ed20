"""The verifying process: runs two models and compares their outputs, where a crash or a full memory hurts nobody.

It is started by `isolated_process`, talks over one socket, and ends when the socket does or after a minute
without work. Messages are JSON behind their length; a request brings descriptors of the files that hold
the models, opened and checked by the parent, so this process opens no model file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes  # noqa: F401 - NumPy learns the names of its types
import numpy as np

from bnexport.errors import BnexportError
from bnexport.verification import precise, runner
from bnexport.verification.comparison import compare_output, compare_with_truth
from bnexport.verification.runner import ENGINES, Runner, Serialised
from bnexport.verification.samples import FREE_SIZES, InputSpec, samples
from bnexport.verification.smaller_inputs import (
    Attempt,
    as_hidden,
    attempts,
    is_float,
    scaled,
    shows_inputs,
    with_smaller,
)
from bnexport.verification.verdict import OutputComparison, Verification

LENGTH = struct.Struct("<Q")
MAX_DESCRIPTORS = 64
IDLE_SECONDS = 60.0


def main(descriptor: int) -> None:
    """Serves requests until the parent closes its end."""
    # Whoever started this process is still at work on the models.
    runner.load_engine()
    with socket.socket(fileno=descriptor) as channel:
        while True:
            channel.settimeout(IDLE_SECONDS)
            try:
                request, descriptors = receive(channel)
            except (TimeoutError, EOFError):
                return
            channel.settimeout(None)
            try:
                result = _Job(request, descriptors, channel).run()
            finally:
                for each in descriptors:
                    os.close(each)
            send(channel, {"result": result})


def send(channel: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message; descriptors go with its length."""
    data = json.dumps(message).encode()
    socket.send_fds(channel, [LENGTH.pack(len(data))], list(descriptors))
    channel.sendall(data)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive one message and its descriptors. Raises EOFError where the other end has closed."""
    head, descriptors, _, _ = socket.recv_fds(channel, LENGTH.size, MAX_DESCRIPTORS)
    head += _exactly(channel, LENGTH.size - len(head)) if head else b""
    if not head:
        raise EOFError
    return json.loads(_exactly(channel, LENGTH.unpack(head)[0])), list(descriptors)


def _exactly(channel: socket.socket, size: int) -> bytes:
    pieces = []
    while size:
        piece = channel.recv(min(size, 1 << 20))
        if not piece:
            raise EOFError
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


class _Job:
    """One request: models, inputs, and what is asked of them."""

    def __init__(self, request: dict[str, Any], descriptors: list[int], channel: socket.socket) -> None:
        self._request = request
        self._descriptors = descriptors
        self._channel = channel

    def run(self) -> dict[str, Any]:
        """Compare the models; return the fields of a Verification that this process knows."""
        reference, candidate = self._model("reference"), self._model("candidate")
        reasons = []
        # Only ONNX Runtime has providers.
        for engine in ENGINES[:1] if candidate.providers else ENGINES:
            try:
                return self._run(engine, reference, candidate)
            except BnexportError as error:
                reasons.append(str(error))
        return {"status": "not_verified", "reason": "; ".join(reasons)}

    def _run(self, engine: type[Runner], reference: Serialised, candidate: Serialised) -> dict[str, Any]:
        """Return the verdict in one engine, on smaller inputs where the first decide nothing.

        One session is open at a time.
        """
        inputs: list[dict[str, np.ndarray]] = []
        session: Runner | None = None

        def run(scale: float) -> list[list[Any]] | None:
            nonlocal inputs, session
            if session is None:
                self._stage("reference", engine)
                session = engine(reference)
            if not inputs:
                inputs, expected = self._inputs_that_run(session)
                return expected
            with contextlib.suppress(BnexportError):
                return [session.run(scaled(sample, scale), self._names("reference")) for sample in inputs]
            return None

        first: dict[str, Any] | None = None
        scalable = self._has_float_inputs()
        for attempt in attempts(run, scalable=scalable):
            session = None
            self._stage("candidate", engine)
            names = self._names("candidate")
            feeds = [scaled(sample, attempt.scale) for sample in inputs]
            try:
                loaded = engine(candidate)
                got = [loaded.run(sample, names) for sample in feeds]
            except BnexportError as error:
                if candidate.needs_library:
                    raise
                return {"status": "failed", "reason": str(error), "engine": engine.name}
            del loaded
            self._stage("comparison", engine)
            answer = self._compare(reference, feeds, attempt, got)
            shown = engine.label() + (f" ({candidate.providers[0]})" if candidate.providers else "")
            answer |= {"engine": shown, "samples": len(inputs), "input_scale": attempt.scale}
            if answer["status"] != "not_verified":
                return answer
            first = first or answer
        assert first is not None
        return first | ({"reason": with_smaller(first["reason"])} if scalable and inputs else {})

    def _stage(self, stage: str, engine: type[Runner]) -> None:
        """Tells the parent what is being done, in case nothing else is heard of it."""
        send(self._channel, {"stage": stage, "engine": engine.name})

    def _model(self, which: str) -> Serialised:
        fields = self._request[which]
        data = os.pread(self._descriptors[0], fields["data"][1], fields["data"][0])
        weights = {entry["name"]: self._mapped(entry) for entry in fields["weights"]}
        providers = tuple(self._request.get("providers", ())) if which == "candidate" else ()
        return Serialised(data, weights, fields["library"], fields["no_library"], fields["training"], providers)

    def _mapped(self, entry: dict[str, Any]) -> np.ndarray:
        """Map a tensor where it lies in its file."""
        shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"]).newbyteorder("<")
        if 0 in shape:
            return np.zeros(shape, dtype)
        with os.fdopen(os.dup(self._descriptors[entry["file"]]), "rb") as file:
            return np.asarray(np.memmap(file, dtype, "c", entry["offset"], shape))

    def _names(self, which: str) -> list[str]:
        return [*self._request["outputs"], *(probe[which] for probe in self._request["probes"])]

    def _inputs_that_run(self, loaded: Runner) -> tuple[list[dict[str, np.ndarray]], list[list[Any]]]:
        """Inputs that the reference accepts, and its outputs."""
        request, names = self._request, self._names("reference")
        if request["given"] is not None:
            given = [{entry["name"]: self._array(entry) for entry in sample} for sample in request["given"]]
            return given, [loaded.run(sample, names) for sample in given]
        specs = [InputSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in request["inputs"]]
        sizes = FREE_SIZES if any(spec.is_free for spec in specs) else FREE_SIZES[:1]
        for index, free_size in enumerate(sizes):
            try:
                chosen = list(samples(specs, request["seed"], request["count"], free_size))
                return chosen, [loaded.run(sample, names) for sample in chosen]
            except BnexportError:
                if index == len(sizes) - 1:
                    raise
        raise AssertionError("FREE_SIZES is empty")

    def _has_float_inputs(self) -> bool:
        given = self._request["given"]
        if given is None:
            return any(spec["kind"] == "float" for spec in self._request["inputs"])
        return any(is_float(self._array(entry)) for sample in given for entry in sample)

    def _array(self, entry: dict[str, Any]) -> np.ndarray:
        return np.asarray(entry["text"], dtype=object) if "text" in entry else np.array(self._mapped(entry))

    def _compare(
        self, reference: Serialised, feeds: list[dict[str, np.ndarray]], attempt: Attempt, got: list[list[Any]]
    ) -> dict[str, Any]:
        """Compare the outputs, each with what is in front of it where that was probed, and then the probes."""
        request = self._request
        names, probes = list(request["outputs"]), request["probes"]
        places = {probe["output"]: len(names) + index for index, probe in enumerate(probes)}
        names += [f"{probe['output']} (before {probe['op_type']})" for probe in probes]
        columns = [([row[i] for row in attempt.expected], [row[i] for row in got]) for i in range(len(names))]
        compared = [
            compare_output(
                name,
                *columns[index],
                request["working"],
                request["atol"],
                request["rtol"],
                columns[places[name]][0] if name in places else None,
            )
            for index, name in enumerate(names)
        ]
        excess = any(output.failed and 0 < output.max_abs_diff < np.inf for output in compared)
        if excess and request["atol"] is None and request["rtol"] is None:
            compared = self._against_float64(reference, feeds, compared, columns)
        if attempt.halved is not None:
            # A saturated output hides its inputs; the probe in front of it shows them.
            shown = [places.get(name, index) for index, name in enumerate(names)]
            seen = [shows_inputs(compared[i], columns[i][0], [row[i] for row in attempt.halved]) for i in shown]
            compared = [output if sees else as_hidden(output) for output, sees in zip(compared, seen, strict=True)]
        verdict = Verification.of(compared)
        if verdict and not any(output.elements for output in compared):
            verdict = dataclasses.replace(verdict, status="not_verified", reason="the outputs are empty")
        outputs = [dataclasses.asdict(output) for output in compared]
        sizes = [[np.shape(array) for array in feed.values()] for feed in feeds]
        return {"status": verdict.status, "reason": verdict.reason, "outputs": outputs, "sizes": sizes}

    def _against_float64(
        self,
        reference: Serialised,
        inputs: list[dict[str, np.ndarray]],
        compared: list[OutputComparison],
        columns: list[tuple[list[Any], list[Any]]],
    ) -> list[OutputComparison]:
        with contextlib.suppress(BnexportError):
            truth = precise.run(reference, inputs, self._names("reference"), self._request["patience"])
            return [
                compare_with_truth(output, *columns[index], [row[index] for row in truth]) if output.failed else output
                for index, output in enumerate(compared)
            ]
        return compared


if __name__ == "__main__":
    main(int(sys.argv[1]))
