"""The verifying process: runs two models and compares their outputs, where a crash or a full memory hurts nobody.

It is started by `isolated_process`, talks over one socket, and ends when the socket does or after a minute
without work. Messages are JSON behind their length; a request brings descriptors of the files that hold
the models, opened and checked by the parent, so this process opens no model file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
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
from bnexport.native.library import ENVIRONMENT_VARIABLE
from bnexport.runtime import engine
from bnexport.runtime.engine import ENGINES, Engine, Serialised
from bnexport.verification import oracle
from bnexport.verification.comparison import compare_output, compare_with_truth
from bnexport.verification.inputs.feeds import FeedGroup, Feeds, joined
from bnexport.verification.inputs.smaller_inputs import (
    Attempt,
    as_hidden,
    attempts,
    is_finite,
    is_float,
    scaled,
    shows_inputs,
    with_smaller,
)
from bnexport.verification.probing.separating import compare_parts, without_masked
from bnexport.verification.probing.ties import Selection, Tail, without_ties
from bnexport.verification.verdict import OutputComparison, Verification

LENGTH = struct.Struct("<Q")
MAX_DESCRIPTORS = 64
IDLE_SECONDS = 60.0


def main(descriptor: int) -> None:
    """Serves requests until the parent closes its end."""
    # Whoever started this process is still at work on the models.
    with contextlib.suppress(ImportError):
        importlib.import_module("onnxruntime")
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
        self._precise = oracle.PreciseModel(reference, self._request["patience"])
        reasons = []
        # Only ONNX Runtime has providers.
        for name in ENGINES[:1] if self._request["providers"] else ENGINES:
            try:
                return self._run(name, reference, candidate)
            except BnexportError as error:
                reasons.append(str(error))
        return {"status": "not_verified", "reason": "; ".join(reasons)}

    def _run(self, name: str, reference: Serialised, candidate: Serialised) -> dict[str, Any]:
        """Return the verdict in one engine, on smaller inputs where the first decide nothing.

        One session is open at a time.
        """
        feeds = Feeds(self._request, self._array)
        groups = feeds.run(self._load(name, reference, "reference"), self._names("reference"), reference.nbytes)
        try:
            rows = self._run_candidate(name, candidate, [group.inputs for group in groups])
        except _Fails as error:
            return {"status": "failed", "reason": str(error), "engine": name}
        self._stage("comparison", name)
        answers = [self._judge(group, Attempt(1.0, group.expected), row) for group, row in zip(groups, rows)]
        label = engine.label(name) + "".join(f" ({provider})" for provider in self._request["providers"][:1])
        answer = joined(answers) | {"engine": label}
        if answer["status"] == "failed" and self._is_random(name, reference, groups[0]):
            return {"status": "not_verified", "reason": "the model draws random numbers", "engine": label}
        if answer["status"] == "not_verified" or not all(map(is_finite, groups[0].expected)):
            answer |= self._on_smaller(name, reference, candidate, groups[0], answer)
        if name != ENGINES[0] and answer["status"] != "not_verified":
            doubt = oracle.find_doubt_alone(reference, groups[0].inputs[0])
            answer |= {"status": "not_verified", "reason": doubt} if doubt else {}
        return answer

    def _on_smaller(
        self,
        name: str,
        reference: Serialised,
        candidate: Serialised,
        group: FeedGroup,
        first: dict[str, Any],
    ) -> dict[str, Any]:
        """Return what smaller inputs decide, or why nothing was decided; nothing where a difference was found before."""
        if first["status"] == "failed" or not any(
            is_float(array) for sample in group.inputs for array in sample.values()
        ):
            return {}
        session: Engine | None = None

        def run(scale: float) -> list[list[Any]] | None:
            nonlocal session
            if scale == 1.0:
                return group.expected
            session = session or self._load(name, reference, "reference")
            with contextlib.suppress(BnexportError):
                return [session.run(scaled(sample, scale), self._names("reference")) for sample in group.inputs]
            return None

        for attempt in attempts(run, scalable=True):
            if attempt.halved is None:
                continue
            session = None
            smaller = FeedGroup(
                [scaled(sample, attempt.scale) for sample in group.inputs], attempt.expected, attempt.scale
            )
            try:
                (rows,) = self._run_candidate(name, candidate, [smaller.inputs])
            except _Fails as error:
                return {"status": "failed", "reason": str(error)}
            self._stage("comparison", name)
            answer = self._judge(smaller, attempt, rows)
            if answer["status"] != "not_verified":
                return answer
        return {} if first["status"] == "passed" else {"reason": with_smaller(first["reason"])}

    def _load(self, name: str, model: Serialised, stage: str) -> Engine:
        self._stage(stage, name)
        providers = self._request["providers"] if stage == "candidate" else ()
        return engine.open_as_written(model, providers, name)

    def _run_candidate(
        self, name: str, candidate: Serialised, inputs: list[list[dict[str, np.ndarray]]]
    ) -> list[list[list[Any]]]:
        """Return the candidate's outputs for each set of each group.

        Raises _Fails where it does not run, though the reference does, in an engine that runs whatever is right.
        """
        try:
            loaded, names = self._load(name, candidate, "candidate"), self._names("candidate")
            return [[loaded.run(sample, names) for sample in group] for group in inputs]
        except BnexportError as error:
            if candidate.needs_library or name != ENGINES[0]:
                raise
            raise _Fails(str(error)) from error

    def _is_random(self, name: str, reference: Serialised, group: FeedGroup) -> bool:
        """Whether a second session of the reference, which draws other random numbers, differs from the first."""
        engine.reseed()
        try:
            again = self._load(name, reference, "reference").run(group.inputs[0], self._names("reference"))
        except BnexportError:
            return False
        working = self._request["working"]
        pairs = zip(group.expected[0], again, strict=True)
        return any(compare_output("", [one], [two], working).failed for one, two in pairs)

    def _stage(self, stage: str, name: str) -> None:
        """Tells the parent what is being done, in case nothing else is heard of it."""
        send(self._channel, {"stage": stage, "engine": name})

    def _model(self, which: str) -> Serialised:
        fields = self._request[which]
        data = os.pread(self._descriptors[0], fields["data"][1], fields["data"][0])
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

    def _names(self, which: str) -> list[str]:
        """Return the names of the outputs, of the values in front of some, and of the indices that others are made of.

        The reference has those behind them that its outputs are concatenated of.
        """
        probes = self._request["probes"]
        indices = [probe["selected"][which == "candidate"] for probe in probes if probe["selected"]]
        names = [*self._request["outputs"], *(probe[which] for probe in probes), *indices]
        return names + [name for parted in self._request["parted"] for name in parted["values"]] * (
            which == "reference"
        )

    def _array(self, entry: dict[str, Any]) -> np.ndarray:
        return np.asarray(entry["text"], dtype=object) if "text" in entry else np.array(self._mapped(entry))

    def _judge(self, group: FeedGroup, attempt: Attempt, got: list[list[Any]]) -> dict[str, Any]:
        """Compare the outputs, and then those that a Concat makes part by part."""
        answer = self._compare(
            group,
            dataclasses.replace(
                attempt,
                expected=self._comparable(attempt.expected),
                halved=None if attempt.halved is None else self._comparable(attempt.halved),
            ),
            self._comparable(got),
        )
        # Bounds of the caller's are those of every number. Smaller inputs need not show in each part.
        bounded = self._request["atol"] is not None or self._request["rtol"] is not None
        if bounded or answer["status"] == "failed" or attempt.halved is not None:
            return answer
        parts = self._compare_parts(group, attempt.expected, got)
        verdict = Verification.of([*(OutputComparison(**each) for each in answer["outputs"]), *parts])
        answer["outputs"] += [dataclasses.asdict(output) for output in parts]
        if verdict.status == "failed" or (parts and answer["status"] == "passed"):
            answer |= {"status": verdict.status, "reason": verdict.reason}
        return answer

    def _comparable(self, rows: list[list[Any]]) -> list[list[Any]]:
        """Return what both models have, without numbers that a Softmax masks."""
        count, start = len(self._names("candidate")), len(self._request["outputs"])
        axes = {start + i: each["axis"] for i, each in enumerate(self._request["probes"]) if each["masking"]}
        return [
            [without_masked(value, axes[i]) if i in axes else value for i, value in enumerate(row[:count])]
            for row in rows
        ]

    def _compare_parts(
        self, group: FeedGroup, expected: list[list[Any]], got: list[list[Any]]
    ) -> list[OutputComparison]:
        start, parts = len(self._names("candidate")), []
        for parted in self._request["parted"]:
            place, stop = self._request["outputs"].index(parted["output"]), start + len(parted["values"])
            here, own = slice(start, stop), place
            start = stop
            if is_float(expected[0][place]):

                def truth(here: slice = here, own: int = own) -> tuple[list[list[Any]], list[Any]]:
                    rows = self._precise.run(group.inputs, self._names("reference"))
                    return [row[here] for row in rows], [row[own] for row in rows]

                columns = [[row[place] for row in rows] for rows in (expected, got)]
                operands = [row[here] for row in expected]
                parts += compare_parts(parted, operands, columns, self._request["working"], truth)
        return parts

    def _compare(self, group: FeedGroup, attempt: Attempt, got: list[list[Any]]) -> dict[str, Any]:
        """Compare the outputs, each with what is in front of it where that was probed, and then the probes."""
        request = self._request
        names, probes = list(request["outputs"]), request["probes"]
        places = {probe["output"]: len(names) + index for index, probe in enumerate(probes)}
        bounding = {probe["output"]: places[probe["output"]] for probe in probes if not probe["selected"]}
        names += [f"{probe['output']} (before {probe['op_type']})" for probe in probes]
        columns = list(
            zip(map(list, zip(*attempt.expected, strict=True)), map(list, zip(*got, strict=True)), strict=True)
        )
        compared = [
            compare_output(
                name,
                *columns[index],
                request["working"],
                request["atol"],
                request["rtol"],
                columns[bounding[name]][0] if name in bounding else None,
            )
            for index, name in enumerate(names)
        ]
        excess = any(output.failed and 0 < output.max_abs_diff < np.inf for output in compared)
        if excess and request["atol"] is None and request["rtol"] is None:
            compared = self._against_float64(group.inputs, compared, columns)
        selections = iter(columns[len(names) :])
        for probe in filter(lambda each: each["selected"], probes):
            index, place, indices = names.index(probe["output"]), places[probe["output"]], next(selections)
            if compared[index].failed and compared[place].passed:
                tail = Tail(self._model("reference"), probe["selected"][0], probe["output"])
                values = Selection(columns[place][0], *indices, probe["axis"], compared[place])
                compared[index] = without_ties(compared[index], columns[index][1], values, tail)
        if attempt.halved is not None:
            # A saturated output hides its inputs; the probe in front of it shows them.
            shown = [places.get(name, index) for index, name in enumerate(names)]
            seen = [shows_inputs(compared[i], columns[i][0], [row[i] for row in attempt.halved]) for i in shown]
            compared = [output if sees else as_hidden(output) for output, sees in zip(compared, seen, strict=True)]
        verdict = Verification.of(compared)
        # Where every size is declared, and one of them is 0, shapes are all that there is.
        is_free = any(spec["shape"] is None or None in spec["shape"] for spec in request["inputs"])
        if verdict and not any(output.elements for output in compared) and (is_free or request["given"]):
            verdict = dataclasses.replace(verdict, status="not_verified", reason="the outputs are empty")
        return {
            "status": verdict.status,
            "reason": verdict.reason,
            "outputs": [dataclasses.asdict(output) for output in compared],
            "sizes": [[np.shape(array) for array in feed.values()] for feed in group.inputs],
            "samples": len(group.inputs),
            "input_scale": group.scale,
        }

    def _against_float64(
        self,
        inputs: list[dict[str, np.ndarray]],
        compared: list[OutputComparison],
        columns: list[tuple[list[Any], list[Any]]],
    ) -> list[OutputComparison]:
        with contextlib.suppress(BnexportError):
            truth = self._comparable(self._precise.run(inputs, self._names("reference")))
            return [
                compare_with_truth(output, *columns[index], [row[index] for row in truth]) if output.failed else output
                for index, output in enumerate(compared)
            ]
        return compared


class _Fails(Exception):
    """The candidate does not run where the reference does."""


if __name__ == "__main__":
    main(int(sys.argv[1]))
