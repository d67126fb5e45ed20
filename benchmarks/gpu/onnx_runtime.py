"""The operators in a session of ONNX Runtime's CUDA provider.

The provider is that of an installed onnxruntime-gpu, or a provider's library beside a CPU build of the same
version; nodes that are not placed on it are an error. In a rehearsal the CPU provider runs our CPU kernels.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.expected import Expected
from benchmarks.gpu.kit import NotRun, Steps
from benchmarks.gpu.libraries import REHEARSES
from benchmarks.gpu.onnx_bytes import TYPES, model, node, tensor, value

PROVIDER = "CUDAExecutionProvider"
GIVEN = os.environ.get("BNEXPORT_KIT_PROVIDER", "installed")
SHAPES = [(4, 8, 9, 9), (33, 7), (16, 64, 28, 28)]
EPS, MOMENTUM = float(np.float32(1e-5)), float(np.float32(0.1))  # as attributes hold them
FORWARD = {"momentum": 0.1, "eps": 1e-5, "group": "", "group_size": 1, "training_mode": 1, "stats_mode": "exact"}
BACKWARD = {"group": "", "group_size": 1, "training_mode": 1, "stats_mode": "exact", "grad_reduction": "local"}
NODES: dict[str, tuple[list[str], list[str], dict[str, Any]]] = {
    "MMCVSyncBatchNorm": (
        ["x", "running_mean", "running_var", "weight", "bias"],
        ["y", "running_mean_out", "running_var_out", "saved_mean", "saved_invstd"],
        FORWARD,
    ),
    "MMCVSyncBatchNormGrad": (
        ["dy", "x", "weight", "saved_mean", "saved_invstd"], ["dx", "", "", "dweight", "dbias"], BACKWARD
    ),
}  # fmt: skip
VECTORS = {"running_mean": 0.0, "running_var": 1.0, "weight": 1.0, "bias": 0.0}


class Sessions:
    """Opens sessions on the provider under test."""

    def __init__(self, provider: str = GIVEN) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise NotRun("onnxruntime is not installed") from error
        self.ort = onnxruntime
        self.devices: list[Any] = []
        if REHEARSES:
            return
        import torch

        torch.cuda.init()  # CUDA's libraries are loaded, which the provider needs
        if provider != "installed":
            onnxruntime.register_execution_provider_library(PROVIDER, provider)
            self.devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER][:1]
            if not self.devices:
                raise RuntimeError(f"{provider}: ONNX Runtime {onnxruntime.__version__} gets no device from it")
        elif PROVIDER not in onnxruntime.get_available_providers():
            version = onnxruntime.__version__
            raise NotRun(f"the installed ONNX Runtime {version} has no {PROVIDER}; name one in BNEXPORT_KIT_PROVIDER")

    def open(self, model: bytes, **provider_options: str) -> Any:
        from bnexport.native.library import register

        options = self.ort.SessionOptions()
        options.log_severity_level = 3
        register(options)
        if REHEARSES:
            return self.ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if not self.devices:
            return self.ort.InferenceSession(model, options, providers=[(PROVIDER, provider_options)])
        options.add_provider_for_devices(self.devices, provider_options)
        return self.ort.InferenceSession(model, options)


def steps(_: str) -> Steps:
    return {
        **{f"operators {dtype}": partial(check_operators, dtype) for dtype in TYPES},
        "threads share a session": partial(check_threads, 1),
        "two sessions at the same time": partial(check_threads, 2),
        "a group of two processes": check_group,
        "CUDA graph": cuda_graph,
    }


def one_node(op: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    inputs, outputs, attributes = NODES[op]
    statistics_type = "float64" if dtype == "float64" else "float32"

    def typed(name: str) -> bytes:
        is_data = name in ("x", "y", "dx", "dy")
        return value(name, dtype if is_data else statistics_type, shape if is_data else shape[1:2])

    made = node(op, inputs, outputs, attributes, "mmcv")
    return model([made], list(map(typed, inputs)), [typed(name) for name in outputs if name])


def inputs_of(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    vectors = {name: rng.uniform(0.5, 1.5, shape[1]) for name in VECTORS}
    vectors = {name: each.astype("float64" if dtype == "float64" else "float32") for name, each in vectors.items()}
    return {"x": (rng.normal(size=shape) * 2 + 1).astype(dtype), "dy": rng.normal(size=shape).astype(dtype), **vectors}


def run_node(session: Any, op: str, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    inputs, outputs, _ = NODES[op]
    results = session.run(None, {name: values[name] for name in inputs})
    return dict(zip(filter(None, outputs), results, strict=True))


def check(dtype: str, values: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> None:
    wide = {name: each.astype(np.float64) for name, each in values.items()}
    running = (wide["running_mean"], wide["running_var"])
    want = Expected(
        dtype, wide["x"], wide["dy"], wide["weight"], wide["bias"], running=running, eps=EPS, momentum=MOMENTUM
    )
    want.check("in a session", **{name: each.astype(np.float64) for name, each in got.items()})


def check_operators(dtype: str) -> str:
    sessions = Sessions()
    for shape in SHAPES:
        values, got = inputs_of(np.random.default_rng(0), dtype, shape), {}
        for op in NODES:
            got |= run_node(sessions.open(one_node(op, dtype, shape)), op, values | got)
        check(dtype, values, got)
    return f"ONNX Runtime {sessions.ort.__version__}, {GIVEN}"


def check_threads(opened: int) -> str:
    """Runs of one session, or of two, at the same time, each with its own input."""
    shape, rounds, op = (8, 16, 32, 32), 20, "MMCVSyncBatchNorm"
    sessions = Sessions()
    all_sessions = [sessions.open(one_node(op, "float32", shape)) for _ in range(opened)]

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(rounds):
            values = inputs_of(rng, "float32", shape)
            check("float32", values, run_node(all_sessions[seed % opened], op, values))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    return f"4 threads, {rounds} runs each"


def check_group() -> str:
    from benchmarks.gpu.two_processes import run_two

    Sessions()  # raises where there is none
    return run_two(GIVEN)


def chain(nodes: int, shape: tuple[int, ...], attributes: dict[str, Any] = FORWARD) -> bytes:
    """Training batch norms in a row, with a Relu behind each."""
    made = []
    for i in range(nodes):
        made.append(node("MMCVSyncBatchNorm", [f"x{i}", *VECTORS], [f"y{i}"], attributes, "mmcv"))
        made.append(node("Relu", [f"y{i}"], [f"x{i + 1}"], {}))
    initializers = [tensor(name, np.full(shape[1], each, np.float32)) for name, each in VECTORS.items()]
    return model(made, [value("x0", "float32", shape)], [value(f"x{nodes}", "float32", shape)], initializers)


def in_torch(x: Any, nodes: int) -> Any:
    import torch

    for _ in range(nodes):
        x = torch.nn.functional.batch_norm(x, None, None, training=True).relu()
    return x


def cuda_graph() -> dict[str, Any]:
    """ONNX Runtime captures a session with our nodes, and replays it on new input."""
    if REHEARSES:
        raise NotRun("an emulated device has no graphs")
    import torch

    shape = (4, 8, 16, 16)
    session = Sessions().open(chain(2, shape), enable_cuda_graph="1")
    x, y = torch.randn(shape, device="cuda"), torch.empty(shape, device="cuda")
    try:
        binding = session.io_binding()
        binding.bind_input("x0", "cuda", 0, np.float32, shape, x.data_ptr())
        binding.bind_output("x2", "cuda", 0, np.float32, shape, y.data_ptr())
    except Exception as error:
        raise NotRun("this build cannot bind device memory: " + str(error).strip().splitlines()[0][:160]) from error
    worst = 0.0
    for _ in range(4):
        x.copy_(torch.randn(shape) * 3 + 1)
        torch.cuda.synchronize()
        session.run_with_iobinding(binding)
        torch.cuda.synchronize()
        worst = max(worst, float((y - in_torch(x, 2)).abs().max()))
    return {"right": worst < 1e-4, "said": f"largest difference {worst:.2g} over 4 inputs"}
