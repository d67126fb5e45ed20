"""Loading of checkpoints of training frameworks into a module.

    torch, timm            a state_dict, or a dict with one under "state_dict" or "model"
    MMCV, mmengine         {"meta", "state_dict", "message_hub", ...}
    Lightning              {"state_dict": {"model.<name>": ...}, ...}
    detectron2             {"model": {<name>: tensor or NumPy array}, ...}
    safetensors            a file that ends in .safetensors

Names may carry the prefixes of wrappers ("module." of DDP, "_orig_mod." of torch.compile, "model." of a
Lightning module); those that fit the module best are taken off.

A checkpoint is a pickle, and a pickle runs what it names. Frameworks store objects of their own beside
the weights (mmengine its logging history), which torch.load(weights_only=True) refuses. Such a file is read
again by an unpickler that knows the few functions that build tensors and replaces everything else by inert
objects: the weights come out, and nothing of the file is run.
"""

from __future__ import annotations

import codecs
import collections
import dataclasses
import pickle
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bnexport import extras, torch_versions
from bnexport.errors import MissingFileError, UsageError

__all__ = ["LoadedCheckpoint", "load_checkpoint", "read_state_dict"]

# Where frameworks keep the state_dict, the first that is there wins.
_CONTAINERS = ("state_dict", "model_state_dict", "model", "net", "network")
_PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.")
# How many names a message lists.
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class LoadedCheckpoint:
    """Result of `load_checkpoint`.

    Attributes:
        container: key that the weights were found under, "" when the file is a state_dict itself.
        prefix: what was taken off the names.
        ignored_objects: Python objects of the file that were not built, by name.
        unexpected: names of the file that the module does not have (empty unless they were allowed).
    """

    container: str
    prefix: str
    ignored_objects: tuple[str, ...]
    unexpected: tuple[str, ...]


class _Inert:
    """Stand-in for an object of a class that is not imported. It accepts every operation of a pickle."""

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...

    def append(self, _: Any) -> None: ...

    def extend(self, _: Any) -> None: ...

    def add(self, _: Any) -> None: ...

    def __hash__(self) -> int:
        return id(self)


def _safe_globals() -> dict[tuple[str, str], Any]:
    """Return the functions that a pickle may call: constructors of tensors, arrays and containers."""
    allowed: dict[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("collections", "defaultdict"): _default_dict,
        ("torch", "Size"): torch.Size,
        ("torch", "device"): torch.device,
        ("builtins", "set"): set,
        ("__builtin__", "set"): set,
    }
    allowed.update({("torch._utils", name): function for name, function in torch_versions.REBUILD.items()})
    for package in ("numpy.core", "numpy._core"):
        allowed[f"{package}.multiarray", "_reconstruct"] = np.zeros(0).__reduce__()[0]
    allowed["numpy", "ndarray"], allowed["numpy", "dtype"] = np.ndarray, np.dtype
    allowed["_codecs", "encode"] = codecs.encode  # the bytes of an array, in pickles of protocol 2
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype) or (isinstance(value, type) and name.endswith("Storage")):
            allowed["torch", name] = value
    return allowed


def _default_dict(*_: Any) -> dict[Any, Any]:
    # Its argument is a function, which would be called.
    return {}


def _inert_pickle(ignored: set[str]) -> Any:
    """Return a module with the interface of `pickle` whose unpickler builds only tensors and arrays."""
    allowed = _safe_globals()

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = allowed.get((module, name))
            if found is not None:
                return found
            ignored.add(f"{module}.{name}")
            return type(name, (_Inert,), {"__module__": module})

    def load(file: Any, **options: Any) -> Any:
        return Unpickler(file, **options).load()

    return types.SimpleNamespace(Unpickler=Unpickler, load=load, __name__="inert_pickle")


def _read(path: Path) -> tuple[Any, tuple[str, ...]]:
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError as error:
            raise extras.missing("safetensors", f"reading {path} needs it") from error
        try:
            return load_file(path), ()
        except Exception as error:
            raise UsageError(f"{path}: not a readable safetensors file: {error}") from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True), ()
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: no such file; expected a checkpoint written by torch.save") from error
    except pickle.UnpicklingError:
        ignored: set[str] = set()
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=False, pickle_module=_inert_pickle(ignored))
        except Exception as error:
            raise UsageError(
                f"{path}: cannot be read as a checkpoint: {error}; expected a file written by torch.save"
            ) from error
        return loaded, tuple(sorted(ignored))
    except Exception as error:
        raise UsageError(
            f"{path}: cannot be read as a checkpoint ({type(error).__name__}: {error}); expected a file written by torch.save"
        ) from error


def _tensors(mapping: Any) -> dict[str, torch.Tensor]:
    """Return the entries of a state_dict as tensors; detectron2 stores NumPy arrays."""
    found = {}
    for name, value in mapping.items():
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)  # noqa: PLW2901
        if isinstance(name, str) and isinstance(value, torch.Tensor):
            found[name] = value.detach()
    return found


def read_state_dict(path: str | Path, key: str | None = None) -> tuple[dict[str, torch.Tensor], str, tuple[str, ...]]:
    """Read the tensors of a checkpoint, the key they were under ("" for none), and the objects that were not built.

    Args:
        path: a file written by torch.save, or .safetensors. Nothing that it names is run.
        key: where the weights are, such as "state_dict_ema" or "ema.module"; None looks in the usual places.

    Raises:
        UsageError: the file cannot be read, or no tensors are where they are looked for.
    """
    path = Path(path)
    loaded, ignored = _read(path)
    if isinstance(loaded, _Inert):
        raise UsageError(
            f"{path}: got an object of {type(loaded).__module__}.{type(loaded).__name__}, which is not built, expected a "
            "state_dict; of a whole module save model.state_dict() instead"
        )
    if not isinstance(loaded, dict):
        raise UsageError(f"{path}: got a {type(loaded).__name__}, expected a dict of tensors, or one that holds it")
    if key is not None:
        inner: Any = loaded
        for part in key.split("."):
            if not isinstance(inner, dict) or part not in inner:
                choices = ", ".join(str(name) for name, value in loaded.items() if isinstance(value, dict))
                raise UsageError(
                    f"{path}: has no key {key!r}, expected "
                    + (f"one of {choices}" if choices else "none: the file is a state_dict itself")
                )
            inner = inner[part]
        candidates = [(key, inner)]
    else:
        candidates = [(name, loaded[name]) for name in _CONTAINERS if isinstance(loaded.get(name), dict)]
        candidates.append(("", loaded))
    for name, mapping in candidates:
        tensors = _tensors(mapping) if isinstance(mapping, dict) else {}
        if tensors:
            return tensors, name, ignored
    raise UsageError(
        f"{path}: found no tensors under {' or '.join(_CONTAINERS)}, nor at the top; its keys are "
        f"{', '.join(map(str, list(loaded)[:_SHOWN]))}; name the right one with key= or --key"
    )


def _without(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keep only entries under the prefix: next to the network, Lightning modules hold losses and metrics."""
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}


def _candidates(state: dict[str, torch.Tensor]) -> list[str]:
    """Return all chains of known prefixes that occur, the shortest first."""
    found, frontier = [""], [""]
    while frontier:
        longer = [
            before + prefix
            for before in frontier
            for prefix in _PREFIXES
            if any(name.startswith(before + prefix) for name in state)
        ]
        found += longer
        frontier = longer
    return found


def _names(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def load_checkpoint(
    module: torch.nn.Module, path: str | Path, *, key: str | None = None, allow_unexpected: bool = False
) -> LoadedCheckpoint:
    """Load the weights of a checkpoint into `module`, all of them or none.

    Args:
        module: takes the weights; unchanged when an error is raised.
        path: a file written by torch.save, or .safetensors. Nothing that it names is run.
        key: where the weights are, such as "state_dict_ema" or "ema.module"; None looks in the usual places.
        allow_unexpected: names that the module does not have are ignored instead of refused, as of an
            auxiliary head that only training needs.

    Raises:
        UsageError: the file cannot be read; names are missing or unexpected; shapes differ. The message lists them.
    """
    state, container, ignored = read_state_dict(path, key)
    own = module.state_dict()
    prefix = min(_candidates(state), key=lambda candidate: len(own.keys() ^ _without(candidate, state).keys()))
    bare = _without(prefix, state)
    # A counter that older checkpoints lack; only momentum=None reads it, and it starts at its own value.
    missing = [name for name in own if name not in bare and not name.endswith("num_batches_tracked")]
    outside = [name for name in state if not name.startswith(prefix)]
    unexpected = [name for name in bare if name not in own] + outside
    shapes = [
        f"{name}: got {tuple(bare[name].shape)}, expected {tuple(value.shape)}"
        for name, value in own.items()
        if name in bare and tuple(bare[name].shape) != tuple(value.shape)
    ]
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {_names(missing)}")
    if unexpected and not allow_unexpected:
        problems.append(
            f"{len(unexpected)} unexpected (allow_unexpected=True or --allow-unexpected ignores them): {_names(unexpected)}"
        )
    if shapes:
        problems.append(f"{len(shapes)} of another shape: {_names(shapes)}")
    if problems:
        raise UsageError(
            f"{path}: its names do not fit the module"
            + (f" (after taking off {prefix!r})" if prefix else "")
            + f": {'; '.join(problems)}; expected the checkpoint of this very model"
        )
    module.load_state_dict({name: value for name, value in bare.items() if name in own}, strict=False)
    return LoadedCheckpoint(container, prefix, ignored, tuple(unexpected))
