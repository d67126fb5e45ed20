"""One case in one runtime: `python -m tests.runtimes.engines ENGINE CASE.json`; the result is the last line of stdout."""

from __future__ import annotations

import importlib
import json
import sys
import traceback

import numpy as np


def main(engine: str, path: str) -> None:
    module = importlib.import_module(f"tests.runtimes.engines.{engine}")
    result = {"version": module.version()}
    with open(path, encoding="utf-8") as file:
        case = json.load(file)
    inputs = {
        name: np.asarray(value["data"], value["dtype"]).reshape(value["shape"])
        for name, value in case["inputs"].items()
    }
    try:
        found = module.run(case["path"], inputs, case["outputs"], case["libraries"])
        result["outputs"] = {
            name: {"shape": list(value.shape), "data": np.asarray(value, np.float64).ravel().tolist()}
            for name, value in found.items()
        }
    except Exception as error:  # each runtime has classes of its own
        traceback.print_exc()
        result["reason"] = f"{type(error).__name__}: {error}"
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
