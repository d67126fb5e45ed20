"""Documented bounds on what a model file may ask for; a caller raises one by passing its own record."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds that hold for one `load`.

    model_bytes: size of the .onnx file itself; protobuf cannot hold more than 2 GiB.
    structure_bytes: the same without raw_data of 4 KiB and more, which stays in the file. A message of two
        bytes takes up to 200 in memory, so parsing takes up to 100 times this much, for a hostile file.
    nodes, tensors: how many of each the graphs and functions of a model may hold.
    name_length: characters of one name of a node, value, operator, domain or attribute.
    tensor_bytes: declared size of one tensor.
    graph_depth: graphs inside graphs (If, Loop, Scan bodies).
    allow_links: accept external data files that are symbolic links inside the folder's tree or have
        several hard links, as download caches make them. Containment still holds.
    """

    model_bytes: int = 2**31 - 1
    structure_bytes: int = 2**27
    nodes: int = 10**6
    tensors: int = 10**6
    name_length: int = 2**16
    tensor_bytes: int = 2**40
    graph_depth: int = 32
    allow_links: bool = False


DEFAULT_LIMITS = Limits()
