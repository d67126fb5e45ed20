"""Loading of checkpoints of training frameworks into a module.

    torch, timm            a state_dict, or a dict with one under "state_dict" or "model"
    MMCV, mmengine         {"meta", "state_dict", "message_hub", ...}
    Lightning              {"state_dict": {"model.<name>": ...}, ...}
    detectron2             {"model": {<name>: tensor or NumPy array}, ...}
    YOLO, torch.save(m)    a pickled module, or a dict with some under "model" and "ema"
    safetensors            a file that ends in .safetensors

Names may carry the prefixes of wrappers ("module." of DDP, "_orig_mod." of torch.compile, "model." of a
Lightning module), in the file and in the module; those that fit best are taken off.

A checkpoint is a pickle, and a pickle runs what it names. Frameworks store objects of their own beside
the weights (mmengine its logging history), which torch.load(weights_only=True) refuses. Such a file is read
again by an unpickler that knows the few functions that build tensors and replaces everything else by inert
objects: the weights come out, and nothing of the file is run. An inert object keeps its attributes, among
which a pickled module has its parameters, buffers and submodules.
"""

from __future__ import annotations

import codecs
import collections
import dataclasses
import pickle
import types
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bnexport import interface, torch_versions
from bnexport.errors import MissingFileError, UsageError

__all__ = ["LoadedCheckpoint", "load_checkpoint", "read_state_dict"]

# Where frameworks keep the state_dict, the first that is there wins.
_CONTAINERS = ("state_dict", "model_state_dict", "model", "net", "network", "module")
_PREFIXES = ("module.", "model.", "net.", "network.")
_COMPILED = "_orig_mod."
# Counters that are no weights: of batch norm (older checkpoints lack it, and only momentum=None reads it), of AveragedModel.
_COUNTERS = ("num_batches_tracked", "n_averaged")
# Dicts in dicts that are searched for weights, and modules in modules that a pickle may have.
_DEEPEST, _DEEPEST_MODULE, _MOST_MODULES = 3, 100, 1_000_000
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
        others: keys of other weights in the file that fit the module as well.
    """

    container: str
    prefix: str
    ignored_objects: tuple[str, ...]
    unexpected: tuple[str, ...]
    others: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Weights:
    """Sets of weights in a file, by their keys ("" for the top), the key of the chosen ones, and the objects that were not built."""

    sets: dict[str, dict[str, torch.Tensor]]
    key: str
    ignored_objects: tuple[str, ...]


class _Inert:
    """Stand-in for an object of a class that is not imported. It accepts every operation of a pickle."""

    attributes: Any = None

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.attributes = state

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
            raise interface.missing("safetensors", f"reading {path} needs it") from error
        try:
            return load_file(path), ()
        except Exception as error:
            raise UsageError(f"{path}: not a readable safetensors file: {error}") from error
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any(name.endswith("/constants.pkl") for name in names):  # TorchScript
            return dict(torch.jit.load(path, map_location="cpu").state_dict()), ()
        if any(name.endswith(("/archive_format", "serialized_exported_program.json")) for name in names):
            raise UsageError(
                f"{path}: a program of torch.export, which is exported as it is: bnexport export {path} OUT.onnx,"
                f" or bnexport.export(torch.export.load({str(path)!r}), args, path)"
            )
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


def _tensors(value: Any) -> dict[str, torch.Tensor]:
    """Return the entries of a state_dict, or of a pickled module's, as tensors; detectron2 stores NumPy arrays."""
    if _is_module(value):
        return _module_tensors(value)
    found = {}
    for name, each in value.items() if isinstance(value, dict) else ():
        tensor = torch.from_numpy(each) if isinstance(each, np.ndarray) else each
        if isinstance(name, str) and isinstance(tensor, torch.Tensor):
            found[name] = tensor.detach()
    return found


def _is_module(value: Any) -> bool:
    return isinstance(value, _Inert) and isinstance(value.attributes, dict) and "_parameters" in value.attributes


def _module_tensors(module: _Inert) -> dict[str, torch.Tensor]:
    """Return the state_dict of a pickled module, from the attributes that torch.nn.Module has."""
    found: dict[str, torch.Tensor] = {}
    waiting: list[tuple[tuple[str, ...], Any]] = [((), module)]
    modules = 0
    while waiting:
        path, each = waiting.pop()
        modules += 1
        if len(path) > _DEEPEST_MODULE or modules > _MOST_MODULES:
            raise UsageError(f"the pickled module has more than {_DEEPEST_MODULE} levels or {_MOST_MODULES:,} modules")
        parameters, buffers, inner = (
            each.attributes[name] if isinstance(each.attributes.get(name), dict) else {}
            for name in ("_parameters", "_buffers", "_modules")
        )
        kept_out = each.attributes.get("_non_persistent_buffers_set")
        kept_out = kept_out if isinstance(kept_out, set) else set()
        own = parameters | {name: value for name, value in buffers.items() if name not in kept_out}
        found |= {".".join((*path, name)): value for name, value in _tensors(own).items()}
        waiting += [
            ((*path, name), value) for name, value in inner.items() if isinstance(name, str) and _is_module(value)
        ]
    return found


def _sets(value: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return the sets of tensors in dicts of dicts by their keys, "" for the top; each once, also where two keys have it."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    waiting: list[tuple[tuple[str, ...], Any]] = [((), value)]
    seen = set()
    for path, each in waiting:
        if id(each) in seen or not (isinstance(each, dict) or _is_module(each)):
            continue
        seen.add(id(each))
        tensors = _tensors(each)
        if tensors:
            found[".".join(path)] = tensors
        if isinstance(each, dict) and len(path) < _DEEPEST:
            waiting += [((*path, name), inner) for name, inner in each.items() if isinstance(name, str)]
    return found


def _chosen(sets: Mapping[str, Any]) -> str | None:
    """Return the key of the weights: the usual places, the top, or the only set that there is."""
    usual = (key for name in _CONTAINERS for key in sets if key == name or key.startswith(f"{name}."))
    return next(usual, "" if "" in sets else next(iter(sets)) if len(sets) == 1 else None)


def read_state_dict(path: str | Path, key: str | None = None) -> Weights:
    """Read the sets of tensors of a checkpoint, and choose one.

    Args:
        path: a file written by torch.save, or .safetensors. Nothing that it names is run.
        key: where the weights are, such as "state_dict_ema" or "ema"; None looks in the usual places.

    Raises:
        UsageError: the file cannot be read, or no tensors are where they are looked for.
    """
    path = Path(path)
    loaded, ignored = _read(path)
    if not (isinstance(loaded, dict) or _is_module(loaded)):
        raise UsageError(
            f"{path}: got a {type(loaded).__module__}.{type(loaded).__name__}, expected a dict of tensors, or one that holds "
            "it; save model.state_dict()"
        )
    try:
        sets = _sets(loaded)
        inside = sets if key is None else _sets(_entry(loaded, key))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    chosen = _chosen(inside)
    if chosen is not None:
        at = ".".join(filter(None, (key, chosen)))
        return Weights(sets | {at: inside[chosen]}, at, ignored)
    where = "" if key is None else f" under {key!r}"
    choices = f"one of {', '.join(inside or sets)} with key= or --key" if inside or sets else "a state_dict"
    many = "several sets of" if inside else "no"
    keys = f"; its keys are {_names(list(map(str, loaded)))}" if isinstance(loaded, dict) and not sets else ""
    raise UsageError(f"{path}: found {many} tensors{where}, expected {choices}{keys}")


def _entry(loaded: Any, key: str) -> Any:
    """Return what is under a key with dots in dicts of dicts."""
    inner = loaded
    before: list[str] = []
    for part in key.split("."):
        if not isinstance(inner, dict) or part not in inner:
            here = inner.items() if isinstance(inner, dict) else ()
            named = [str(name) for name, value in here if isinstance(value, dict) or _is_module(value)]
            place = f"{'.'.join(before)!r} has" if before else "has"
            expected = f"one of {', '.join(named)}" if named else "none: it is a set of weights itself"
            raise UsageError(f"{place} no key {part!r}, expected {expected}")
        inner = inner[part]
        before.append(part)
    return inner


def _without(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keep only entries under the prefix: next to the network, Lightning modules hold losses and metrics."""
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}


def _plain(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors by the names that they have without torch.compile."""
    plain = {name.replace(_COMPILED, ""): value for name, value in state.items()}
    return plain if len(plain) == len(state) else state


def _candidates(state: Collection[str]) -> list[str]:
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


def _prefix(own: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> str:
    """Return the prefix of the state's names without which they fit the module's own best."""
    return min(_candidates(state), key=lambda candidate: len(own.keys() ^ _without(candidate, state).keys()))


def _missing(own: dict[str, torch.Tensor], bare: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in own if name not in bare and not name.endswith(_COUNTERS)]


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
        key: where the weights are, such as "state_dict_ema", "ema" or "ema.module"; None looks in the usual places.
        allow_unexpected: names that the module does not have are ignored instead of refused, as of an
            auxiliary head that only training needs.

    Raises:
        UsageError: the file cannot be read; names are missing or unexpected; shapes differ. The message lists them.
    """
    weights = read_state_dict(path, key)
    of_module = module.state_dict()
    plain = _plain(of_module)
    wrapper = max(
        (each for each in _candidates(plain) if all(map(str.startswith, plain, [each] * len(plain)))), key=len
    )
    names = {
        each.removeprefix(wrapper): name for each, name in zip(plain, of_module)
    }  # without wrappers, and the module's
    own, state = _without(wrapper, plain), _plain(weights.sets[weights.key])
    prefix = _prefix(own, state)
    bare = _without(prefix, state)
    missing = _missing(own, bare)
    unexpected = [name for name in bare if name not in own]
    unexpected += [name for name in state if not name.startswith(prefix)]
    unexpected = [name for name in unexpected if not name.endswith(_COUNTERS)]
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
        where = f" under {weights.key!r}" if weights.key else ""
        taken = f" (after taking off {prefix!r})" if prefix else ""
        expected = (
            "the checkpoint of this very model" if missing or shapes else "no others: the module's own are all there"
        )
        raise UsageError(
            f"{path}: its names{where} do not fit the module{taken}: {'; '.join(problems)}; expected {expected}"
        )
    module.load_state_dict({names[name]: value for name, value in bare.items() if name in own}, strict=False)
    others = []
    for key_of_other, tensors in weights.sets.items():
        other = _plain(tensors)
        if tensors is not weights.sets[weights.key] and not _missing(own, _without(_prefix(own, other), other)):
            others.append(key_of_other)
    return LoadedCheckpoint(weights.key, prefix, weights.ignored_objects, tuple(unexpected), tuple(others))
