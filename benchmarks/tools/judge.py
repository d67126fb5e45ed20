"""Asks one judge whether two files compute the same: `PYTHON -m benchmarks.tools.judge NAME`, requests on stdin.

Runs in the environment of the judge and imports nothing else of this project, unless the judge is ours. Each line of stdin
is a pair, `{"original": PATH, "other": PATH, "range": 4.0 or null, "seconds": 60}`; each line of stdout the verdict on
it, with the seconds of wall and processor time from the paths to the verdict. The pair is judged in a process of its own.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.tools import worker

Request = dict[str, Any]


def load_certify() -> Callable[[Request], tuple[str, str]]:
    import onnx
    from onnxsim import certify

    def judge(request: Request) -> tuple[str, str]:
        original, other = onnx.load(request["original"]), onnx.load(request["other"])
        given = {tensor.name for tensor in original.graph.initializer}
        names = [value.name for value in original.graph.input if value.name not in given]
        largest = request["range"]
        ranges = None if largest is None else dict.fromkeys(names, (-largest, largest))
        # The limit of processor time, which every judge has, is to decide, not certify's own by the clock.
        report = certify.certify(original, other, input_ranges=ranges, timeout_ms=3_600_000)
        if report.ok:
            return "proved", ", ".join(sorted(set(report.outputs.values())))
        status = certify.REFUTED if certify.REFUTED in report.outputs.values() else certify.SKIPPED
        detail = next((window.detail for window in report.windows if window.status == status), "")
        return status, re.sub(r"^(input \S+ ~ \S+: )+", "", detail)

    return judge


def load_ours() -> Callable[[Request], tuple[str, str]]:
    from bnexport import verify

    marks = {"passed": "proved", "failed": "refuted", "not_verified": "skipped"}

    def judge(request: Request) -> tuple[str, str]:
        verdict = verify(request["original"], request["other"], method="local")
        wrong = next((site.reason for site in verdict.sites if site.method == "failed"), verdict.reason)
        if verdict.status == "passed" and any(site.method != "proved" for site in verdict.sites):
            return "compared", wrong
        return marks[verdict.status], wrong

    return judge


JUDGES = {"bnexport": load_ours, "certify": load_certify}


def main() -> None:
    judge = JUDGES[sys.argv[1]]()

    def work() -> dict[str, Any]:
        wall, processor = time.perf_counter(), time.process_time()
        status, reason = judge(request)
        times = {"wall_seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - processor}
        return {"status": status, "reason": reason[:300], **times}

    for line in sys.stdin:
        request = json.loads(line)
        verdict = worker.apart(work, request["seconds"])
        print(json.dumps(verdict), flush=True)
        print(sys.argv[1], request["other"], verdict["status"], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
