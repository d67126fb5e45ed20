"""Section `ort`: the operators in a session of ONNX Runtime's CUDA provider.

The provider is that of an installed onnxruntime-gpu, or a provider's library beside a CPU build of the same
version; nodes that are not placed on it are an error. In a rehearsal the CPU provider runs our CPU kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.gpu import closed_forms, onnx_bytes
from benchmarks.gpu.report import LIMIT, NotRun, Report, Row
from benchmarks.gpu.section import Options
from bnexport import tolerances

PROVIDER = "CUDAExecutionProvider"
OVERHEAD_AT_MOST_US = 15.0
CHAIN = 64  # nodes, to see what one more costs
EPS, MOMENTUM = float(np.float32(1e-5)), float(np.float32(0.1))  # as attributes hold them
FORWARD = {"momentum": 0.1, "eps": 1e-5, "group": "", "group_size": 1, "training_mode": 1, "stats_mode": "exact"}
BACKWARD = {"group": "", "group_size": 1, "training_mode": 1, "stats_mode": "exact", "grad_reduction": "local"}


class Sessions:
    """Opens sessions on the provider under test."""

    def __init__(self, options: Options) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise NotRun("onnxruntime is not installed") from error
        if (
            not options.rehearse
            and options.provider == "installed"
            and PROVIDER not in onnxruntime.get_available_providers()
        ):
            raise NotRun(
                f"the installed ONNX Runtime {onnxruntime.__version__} has no {PROVIDER}; give one with --provider"
            )
        self.ort, self.options = onnxruntime, options
        self.devices: list[Any] = []
        if not options.rehearse:
            import torch

            torch.cuda.init()  # CUDA's libraries are loaded, which the provider needs
        if not options.rehearse and options.provider != "installed":
            onnxruntime.register_execution_provider_library(PROVIDER, options.provider)
            self.devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER][:1]
            if not self.devices:
                raise RuntimeError(f"{options.provider}: ONNX Runtime {onnxruntime.__version__} gets no device from it")

    def open(self, model: bytes, **provider_options: str) -> Any:
        from bnexport.native.library import register

        options = self.ort.SessionOptions()
        options.log_severity_level = 3
        register(options)
        if self.options.rehearse:
            return self.ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if not self.devices:
            return self.ort.InferenceSession(model, options, providers=[(PROVIDER, provider_options)])
        options.add_provider_for_devices(self.devices, provider_options)
        return self.ort.InferenceSession(model, options)


def run(report: Report, options: Options) -> None:
    sessions: Sessions | None = None
    with report.step("provider") as row:
        sessions = Sessions(options)
        row.value = f"ONNX Runtime {sessions.ort.__version__}, {options.provider}"
    if sessions is None:
        return
    for dtype in onnx_bytes.TYPES:
        for shape in ((4, 8, 9, 9), (33, 7), (16, 64, 28, 28)):
            name = f"operators {dtype} {'x'.join(map(str, shape))}"
            if not report.wanted(name):
                continue
            with report.step(name):
                check_operators(sessions, dtype, shape)
    for name, check in (
        ("threads share a session", check_threads),
        ("two sessions at the same time", check_sessions),
        ("training BatchNormalization of ONNX", own_batch_norm),
        ("model against torch", check_model),
        ("a group of two processes", check_group),
        ("overhead of a node", overhead),
        ("CUDA graph", cuda_graph),
    ):
        if report.wanted(name):
            with report.step(name, 70 if check is check_group else LIMIT) as row:
                check(sessions, row)


def close(got: np.ndarray, want: np.ndarray, bound: tolerances.Tolerance, what: str) -> None:
    error = np.abs(got.astype(np.float64) - want) - (bound.rtol * np.abs(want) + bound.atol)
    if not (error <= 0).all():  # NaN is wrong
        raise AssertionError(f"{what}: {int((~(error <= 0)).sum())} of {want.size} values off, bound {bound}")


def statistics_type(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def forward_model(dtype: str, shape: tuple[int, ...]) -> bytes:
    S, vector = statistics_type(dtype), (shape[1],)
    inputs = ["input", "running_mean", "running_var", "weight", "bias"]
    outputs = ["output", "running_mean_out", "running_var_out", "saved_mean", "saved_invstd"]
    return onnx_bytes.model(
        [onnx_bytes.node("MMCVSyncBatchNorm", inputs, outputs, FORWARD, "mmcv")],
        [onnx_bytes.value("input", dtype, shape), *(onnx_bytes.value(name, S, vector) for name in inputs[1:])],
        [onnx_bytes.value("output", dtype, shape), *(onnx_bytes.value(name, S, vector) for name in outputs[1:])],
    )


def backward_model(dtype: str, shape: tuple[int, ...]) -> bytes:
    S, vector = statistics_type(dtype), (shape[1],)
    inputs = ["grad_output", "input", "weight", "saved_mean", "saved_invstd"]
    outputs = ["grad_input", "", "", "grad_weight", "grad_bias"]
    return onnx_bytes.model(
        [onnx_bytes.node("MMCVSyncBatchNormGrad", inputs, outputs, BACKWARD, "mmcv")],
        [*(onnx_bytes.value(name, dtype, shape) for name in inputs[:2]), *(onnx_bytes.value(name, S, vector) for name in inputs[2:])],
        [onnx_bytes.value("grad_input", dtype, shape), *(onnx_bytes.value(name, S, vector) for name in outputs[3:])],
    )  # fmt: skip


def forward_feeds(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    S = statistics_type(dtype)
    feeds = {name: rng.normal(size=shape[1]).astype(S) for name in ("running_mean", "weight", "bias")}
    feeds["running_var"] = rng.uniform(0.5, 1.5, shape[1]).astype(S)
    return {"input": (rng.normal(size=shape) * 2 + 1).astype(dtype), **feeds}


def check_forward(dtype: str, feeds: dict[str, np.ndarray], outputs: list[np.ndarray]) -> None:
    x, weight = feeds["input"], feeds["weight"].astype(np.float64)
    y, mean, invstd = closed_forms.forward(x, weight, feeds["bias"].astype(np.float64), EPS)
    condition = 1 + float(np.abs(mean * invstd).max())
    close(outputs[0], y, tolerances.forward(dtype, condition=condition, weight=float(np.abs(weight).max())), "output")
    close(outputs[3], mean, tolerances.statistic(dtype, scale=4.0), "saved_mean")
    count = x.size / x.shape[1]
    unbiased = (1 / invstd**2 - EPS) * count / (count - 1)
    for at, (name, new) in enumerate((("running_mean", mean), ("running_var", unbiased)), 1):
        updated = (1 - MOMENTUM) * feeds[name].astype(np.float64) + MOMENTUM * new
        close(outputs[at], updated, tolerances.statistic(dtype, scale=float(np.abs(new).max()) + 4), name)


def check_operators(sessions: Sessions, dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    feeds = forward_feeds(rng, dtype, shape)
    outputs = sessions.open(forward_model(dtype, shape)).run(None, feeds)
    check_forward(dtype, feeds, outputs)
    x, dy, weight = feeds["input"], rng.normal(size=shape).astype(dtype), feeds["weight"]
    mean, invstd = outputs[3], outputs[4]
    got = sessions.open(backward_model(dtype, shape)).run(
        None, {"grad_output": dy, "input": x, "weight": weight, "saved_mean": mean, "saved_invstd": invstd}
    )
    wide = [value.astype(np.float64) for value in (weight, mean, invstd)]
    want = closed_forms.backward(dy, x, *wide)
    condition = 1 + float(np.abs(wide[1] * wide[2]).max())
    largest = float(np.abs(wide[0] * wide[2]).max() * np.abs(dy).max())
    close(got[0], want[0], tolerances.backward_input(dtype, condition=condition, scale=largest), "grad_input")
    terms = float(np.abs(dy).sum() / shape[1] * 4)
    for result, expected, what in ((got[1], want[1], "grad_weight"), (got[2], want[2], "grad_bias")):
        close(result, expected, tolerances.backward_sum(dtype, condition=condition, absolute_sum=terms), what)


def check_threads(sessions: Sessions, row: Row, opened: int = 1) -> None:
    """Runs of one session at the same time, each with its own input."""
    shape, rounds = (8, 16, 32, 32), 20
    all_sessions = [sessions.open(forward_model("float32", shape)) for _ in range(opened)]

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(rounds):
            feeds = forward_feeds(rng, "float32", shape)
            check_forward("float32", feeds, all_sessions[seed % opened].run(None, feeds))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    row.value = f"4 threads, {rounds} runs each"


def check_sessions(sessions: Sessions, row: Row) -> None:
    check_threads(sessions, row, opened=2)


def check_group(sessions: Sessions, row: Row) -> None:
    from benchmarks.gpu.two_processes import run_two

    row.value = run_two(sessions.options, sessions.options.provider)


def chain(nodes: int, shape: tuple[int, ...], *, ours: bool = True) -> bytes:
    """Training batch norms in a row: our node, or ONNX's own."""
    C, made = shape[1], []
    for i in range(nodes):
        if ours:
            inputs, attributes = [f"x{i}", "mean", "var", "weight", "bias"], FORWARD
            made.append(onnx_bytes.node("MMCVSyncBatchNorm", inputs, [f"x{i + 1}"], attributes, "mmcv"))
        else:
            inputs, outputs = [f"x{i}", "weight", "bias", "mean", "var"], [f"x{i + 1}", f"mean{i}", f"var{i}"]
            made.append(onnx_bytes.node("BatchNormalization", inputs, outputs, {"training_mode": 1}))
    vectors = {"mean": 0.0, "var": 1.0, "weight": 1.0, "bias": 0.0}
    initializers = [onnx_bytes.tensor(name, np.full(C, value, np.float32)) for name, value in vectors.items()]
    ends = [onnx_bytes.value(name, "float32", shape) for name in ("x0", f"x{nodes}")]
    return onnx_bytes.model(made, ends[:1], ends[1:], initializers)


def own_batch_norm(sessions: Sessions, row: Row) -> None:
    x = np.random.default_rng(0).normal(size=(4, 8, 16, 16)).astype(np.float32)
    row.ok = None
    try:
        sessions.open(chain(1, x.shape, ours=False)).run(None, {"x0": x})
        row.value = "runs"
    except Exception as error:  # ONNX Runtime has one class for each status
        row.value = "refused: " + str(error).strip().splitlines()[0][:160]


def check_model(sessions: Sessions, row: Row) -> None:
    """Convolutions with batch norms between them, trained mode, in ONNX Runtime and in torch without TF32."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    rng, shape, width = np.random.default_rng(3), (4, 3, 32, 32), 16
    filters = {
        f"w{i}": (rng.normal(size=(width, c, 3, 3)) / np.sqrt(9 * c)).astype(np.float32)
        for i, c in ((0, 3), (1, width))
    }
    vectors = {"mean": 0.0, "var": 1.0, "weight": 1.0, "bias": 0.0}
    nodes, at = [], "x"
    for i in range(2):
        pads = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
        nodes.append(onnx_bytes.node("Conv", [at, f"w{i}"], [f"c{i}"], pads))
        nodes.append(onnx_bytes.node("MMCVSyncBatchNorm", [f"c{i}", *vectors], [f"n{i}"], FORWARD, "mmcv"))
        nodes.append(onnx_bytes.node("Relu", [f"n{i}"], [f"r{i}"], {}))
        at = f"r{i}"
    model = onnx_bytes.model(
        nodes,
        [onnx_bytes.value("x", "float32", shape)],
        [onnx_bytes.value(at, "float32", (shape[0], width, *shape[2:]))],
        [onnx_bytes.tensor(name, values) for name, values in filters.items()]
        + [onnx_bytes.tensor(name, np.full(width, value, np.float32)) for name, value in vectors.items()],
    )
    x = rng.normal(size=shape).astype(np.float32)
    provider_options = {} if sessions.options.rehearse else {"use_tf32": "0"}
    got = sessions.open(model, **provider_options).run(None, {"x": x})[0]
    want = torch.from_numpy(x).to(sessions.options.device)
    for i in range(2):
        want = torch.nn.functional.conv2d(want, torch.from_numpy(filters[f"w{i}"]).to(want.device), padding=1)
        want = torch.nn.functional.batch_norm(want, None, None, training=True, eps=1e-5).relu()
    expected = want.cpu().numpy()
    bound = tolerances.model("float32", expected)
    close(got, expected.astype(np.float64), bound, "output")
    row.value = f"largest difference {np.abs(got - expected).max():.2g}, allowed {bound.atol:.2g}"


def median_us(call: Callable[[], Any], repeats: int) -> float:
    for _ in range(repeats // 10 + 1):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def overhead(sessions: Sessions, row: Row) -> None:
    """What one more node costs in a session, against one more call of the kernel in a CUDA graph."""
    import torch

    from bnexport.sync_bn import operators

    shape, repeats = (2, 8, 4, 4), 20 if sessions.options.rehearse else 200
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    short, long = (sessions.open(chain(nodes, shape)) for nodes in (1, 1 + CHAIN))
    in_session = [median_us(lambda s=s: s.run(None, {"x0": x}), repeats) for s in (short, long)]
    node = (in_session[1] - in_session[0]) / CHAIN
    if sessions.options.rehearse:
        row.ok, row.value = None, f"{node:.1f} us"
        return
    start = torch.from_numpy(x).cuda()
    vectors = [torch.full((8,), value, device="cuda") for value in (0.0, 1.0, 1.0, 0.0)]

    def calls() -> None:
        y = start
        for _ in range(CHAIN):
            y = operators.sync_batch_norm(y, *vectors, True, 0.1, 1e-5, "", 1, "exact", "local", 0)[0]

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    bare = median_us(replay, repeats) / CHAIN
    row.ok = node - bare < OVERHEAD_AT_MOST_US
    row.value = (
        f"{node - bare:.1f} us ({node:.1f} in a session, {bare:.1f} in a graph; at most {OVERHEAD_AT_MOST_US:.0f})"
    )
    row.data = {"node_us": node, "kernel_us": bare}


def cuda_graph(sessions: Sessions, row: Row) -> None:
    """ONNX Runtime captures a session with our nodes, and replays it on new input."""
    if sessions.options.rehearse:
        raise NotRun("an emulated device has no graphs")
    import torch

    shape = (4, 8, 16, 16)
    session = sessions.open(chain(2, shape), enable_cuda_graph="1")
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
        want = torch.nn.functional.batch_norm(x, None, None, training=True)
        worst = max(worst, float((y - torch.nn.functional.batch_norm(want, None, None, training=True)).abs().max()))
    row.ok, row.value = worst < 1e-4, f"largest difference {worst:.2g} over 4 inputs"
