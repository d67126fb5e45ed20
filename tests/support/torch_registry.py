"""Build torch's tables of operators once in a process, not once in every export.

torch.onnx.export parses the source of about 500 functions of onnxscript each time, and torch.export walks through all
operators that the dispatcher knows. For a small network both take longer than the rest of its export. Neither depends
on the network: the first depends on the opset, the second on which operators are registered.
"""

import contextlib
import functools
import logging
from typing import Any


def remember(opsets: tuple[int, ...] = ()) -> None:
    """Make exports in this process share the tables, built now for `opsets` and later for others when they are needed.

    Without effect on a torch that builds them in another way.
    """
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        _remember_translations(opsets)
    with contextlib.suppress(ImportError, AttributeError):
        _remember_operators()


def _remember_translations(opsets: tuple[int, ...]) -> None:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    build = ONNXRegistry.from_torchlib.__func__  # type: ignore[attr-defined]
    built = functools.cache(lambda *opset_version: build(ONNXRegistry, *opset_version))
    logging.disable(logging.WARNING)  # about torchvision, which is not here
    for opset in opsets:
        built(opset)
    logging.disable(logging.NOTSET)

    def from_torchlib(cls: type, *opset_version: Any, **named: Any) -> Any:
        table = built(*opset_version, *named.values())
        own = cls()
        own._opset_version = table._opset_version
        own.functions = {target: list(found) for target, found in table.functions.items()}
        return own

    ONNXRegistry.from_torchlib = classmethod(from_torchlib)  # type: ignore[assignment]


def _remember_operators() -> None:
    import torch
    from torch._export import utils

    materialize, list_registered = utils._materialize_cpp_cia_ops, torch._C._dispatch_get_registrations_for_dispatch_key
    known = 0

    def materialize_new() -> None:
        nonlocal known
        count = len(list_registered("CompositeImplicitAutograd"))
        if count != known:
            materialize()
            known = count

    utils._materialize_cpp_cia_ops = materialize_new
