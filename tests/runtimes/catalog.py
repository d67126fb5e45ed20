"""The runtimes, and what of the package indices each needs."""

from __future__ import annotations

import dataclasses

# Minor versions of ONNX Runtime 1; the newest is asked for without a number as well.
FIRST, LAST = 17, 32


@dataclasses.dataclass(frozen=True)
class Runtime:
    """engine: a module of tests/runtimes/engines, or "javascript". libraries: whether it takes custom-op libraries."""

    name: str
    engine: str
    packages: tuple[str, ...]
    libraries: bool = False

    @property
    def is_javascript(self) -> bool:
        return self.engine == "javascript"


def _onnxruntime(version: str, *, old_numpy: bool = False) -> Runtime:
    packages = (f"onnxruntime{version}", "numpy<2" if old_numpy else "numpy")
    return Runtime("onnxruntime", "onnxruntime_cpu", packages, libraries=True)


RUNTIMES = {
    **{
        f"onnxruntime-1.{minor}": _onnxruntime(f"==1.{minor}.*", old_numpy=minor < 19)
        for minor in range(FIRST, LAST + 1)
    },
    "onnxruntime-newest": _onnxruntime(""),
    "onnxruntime-node": Runtime("onnxruntime-node", "javascript", ("onnxruntime-node",)),
    "onnxruntime-web": Runtime("onnxruntime-web", "javascript", ("onnxruntime-web",)),
    "onnx-reference": Runtime("onnx.reference", "onnx_reference", ("onnx",)),
    "openvino": Runtime("OpenVINO", "openvino_cpu", ("openvino", "numpy")),
    "tract": Runtime("tract", "tract_onnx", ("tract", "numpy")),
    "ncnn": Runtime("ncnn", "ncnn_pnnx", ("ncnn", "pnnx", "numpy")),
    "onnx2torch": Runtime("onnx2torch", "onnx_to_torch", ("torch", "onnx2torch", "onnx")),
    "tvm": Runtime("TVM", "tvm_relax", ("apache-tvm", "onnx")),
}
