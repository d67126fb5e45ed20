"""Documented bounds on what a model file may ask for; a caller raises one by passing its own record."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds that hold for one `load`.

    model_bytes: size of the .onnx file itself; protobuf cannot hold more than 2 GiB.
    tensor_bytes: declared size of one tensor.
    graph_depth: graphs inside graphs (If, Loop, Scan bodies).
    allow_links: accept external data files that are symbolic links inside the folder's tree or have
        several hard links, as download caches make them. Containment still holds.
    """

    model_bytes: int = 2**31 - 1
    tensor_bytes: int = 2**40
    graph_depth: int = 32
    allow_links: bool = False


DEFAULT_LIMITS = Limits()
