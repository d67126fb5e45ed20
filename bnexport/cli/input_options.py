"""What commands are given: --input arguments as arrays, checked before anything runs, and torch modules by their names."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnexport.cli.output import detail, is_verbose, say, status
from bnexport.errors import MissingDependencyError, MissingFileError, UsageError, summary
from bnexport.interface import LIBRARIES, suggestion

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir


_FORM = "expected NAME:SHAPE such as x:1,3,224,224, or NAME:FILE.npy, or FILE.npz"


@dataclasses.dataclass(frozen=True)
class Argument:
    """One --input: the values of a file, or a shape that gets random ones."""

    name: str
    shape: tuple[int, ...]
    values: np.ndarray | None


def parse(texts: Sequence[str]) -> list[Argument]:
    arguments: dict[str, Argument] = {}
    for text in texts:
        name, _, value = text.rpartition(":")
        if text.endswith(".npz") and Path(text).is_file():
            arguments.update((each.name, each) for each in _read_arrays(text))
            continue
        if not name or not value:
            other = text.replace("=", ":", 1)
            hint = f"; did you mean {other!r}?" if ":" not in text and "=" in text else ""
            raise UsageError(f"--input: got {text!r}, {_FORM}{hint}")
        if name in arguments:
            raise UsageError(f"--input: got {name!r} twice, expected each input once")
        arguments[name] = _read_argument(name, value)
    return list(arguments.values())


def _read_arrays(path: str) -> list[Argument]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as found:
            return [Argument(name, found[name].shape, found[name]) for name in found.files]
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"--input: cannot read {path!r}, expected a file that numpy.savez wrote") from error


def missing_input(model: str) -> UsageError:
    """Make the error for a model whose input sizes nothing states."""
    return UsageError(
        f"Missing option '--input' / '-i': nothing states the sizes of the inputs of {model}; "
        "give them, such as --input x:1,3,224,224; see bnexport export --help"
    )


def _read_argument(name: str, value: str) -> Argument:
    if re.fullmatch(r"\d+(,\d+)*", value):
        return Argument(name, tuple(map(int, value.split(","))), None)
    if not Path(value).is_file():
        raise UsageError(f"--input {name}: {value!r} is neither a shape nor a file that exists; {_FORM}")
    import numpy as np

    try:
        values = np.load(value, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"--input {name}: cannot read {value!r}, expected a file that numpy.save wrote") from error
    if not isinstance(values, np.ndarray):
        raise UsageError(f"--input {name}: {value!r} holds several arrays, expected one, as numpy.save writes it")
    return Argument(name, values.shape, values)


def feeds_of(
    inputs: list[str] | None, seed: int, model: Path, *, all_of_them: bool = False, free: tuple[int, int] | None = None
) -> dict[str, np.ndarray]:
    """Return the arrays to feed to `model`, by name.

    Random ones are of the type that the model asks for, in the order of its inputs. Inputs that are not given
    are made up where all their sizes are fixed. Without any --input the result is empty, unless `all_of_them`
    are needed. free: the first size and the others of inputs that leave them open, for want of which they are an
    error; the same name of a dimension gets the same size.
    """
    import numpy as np

    from bnexport.graph.shapes import described
    from bnexport.model_io import load

    if not inputs and not all_of_them:
        return {}
    given = {argument.name: argument for argument in parse(inputs or ())}
    graph_inputs = load(model).graph.inputs
    declared = {str(value.name): value for value in graph_inputs}
    for name in given:
        if name not in declared:
            choices = "; ".join(map(described, declared.values())) or "none"
            raise UsageError(f"--input: {model} has no input {name!r}, expected one of: {choices}")
    generator = np.random.default_rng(seed)
    feeds: dict[str, np.ndarray] = {}
    named: dict[str, int] = {}
    for name, value in declared.items():
        argument = given.get(name)
        if argument is None and not value.is_initializer():
            argument = Argument(name, _own_shape(value, model, free, named), None)
        if argument is not None:
            feeds[name] = _fitting(argument, value, generator)
    return feeds


def _own_shape(value: ir.Value, model: Path, free: tuple[int, int] | None, named: dict[str, int]) -> tuple[int, ...]:
    from bnexport.graph.shapes import described, sizes_of

    sizes = None if value.shape is None else sizes_of(value.shape)
    if free is not None and sizes is not None:
        chosen = []
        for axis, size in enumerate(sizes):
            default = free[0] if axis == 0 else free[1]
            if isinstance(size, str):
                default = named.setdefault(size, default)
            chosen.append(size if isinstance(size, int) else default)
        return tuple(chosen)
    sizes = (None,) if sizes is None else sizes
    shape = tuple(size for size in sizes if isinstance(size, int))
    if len(shape) != len(sizes):
        raise UsageError(
            f"--input: missing {value.name}; {model} takes {described(value)}; give its sizes, such as "
            f"--input {value.name}:{','.join(_example(axis, size) for axis, size in enumerate(sizes))}"
        )
    return shape


def _example(axis: int, size: int | str | None) -> str:
    return str(size) if isinstance(size, int) else ("1" if axis == 0 else "64")


def _fitting(argument: Argument, value: ir.Value, generator: np.random.Generator) -> np.ndarray:
    """Return the values of the argument, or random ones."""
    import numpy as np

    from bnexport.graph.shapes import described, fits, shown

    dtype = np.dtype(np.float32) if value.dtype is None else value.dtype.numpy()
    where = f"--input {argument.name}"
    if not fits(argument.shape, value):
        raise UsageError(f"{where}: got shape {shown(argument.shape)}, expected {described(value)}")
    if argument.values is not None:
        if value.dtype is not None and argument.values.dtype != dtype:
            raise UsageError(f"{where}: got {argument.values.dtype}, expected {described(value)}; convert it first")
        return argument.values
    if dtype.kind == "O":
        return np.full(argument.shape, "a", dtype=object)
    if dtype.kind in "iub":
        # Indices into anything are valid when they are 0 or 1.
        return generator.integers(0, 2, argument.shape).astype(dtype)
    return generator.standard_normal(argument.shape).astype(dtype)


def chosen_dimensions(
    texts: Sequence[str] | None, dynamic: bool, names: Sequence[str]
) -> bool | dict[str, dict[int, str]]:
    """Return the argument `dynamic` of an export: --dynamic-dims by input, with the names given, or the switch.

    names: of the inputs that --input gives; empty where the model's own are not known yet.
    """
    if not texts:
        return dynamic
    if not dynamic:
        raise UsageError("--dynamic-dims, --static: got both, expected one of them")
    found: dict[str, dict[int, str]] = {}
    for text in texts:
        name, _, listed = text.rpartition(":")
        parts = [part.partition("=") for part in listed.split(",")]
        if not name or not all(re.fullmatch(r"\d+", index) and (label or not equals) for index, equals, label in parts):
            raise UsageError(f"--dynamic-dims: got {text!r}, expected NAME:DIMENSIONS such as x:0,2,3 or x:0=batch")
        if names and name not in names:
            raise UsageError(f"--dynamic-dims: got {name!r}, expected an input among {', '.join(names)}")
        found.setdefault(name, {}).update({int(index): label for index, _, label in parts})
    return found


def example_inputs(arguments: Sequence[Argument], seed: int) -> tuple[list[str], tuple[Any, ...]]:
    """Return the names and tensors of an export, in the order given; random ones are float32."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = tuple(
        torch.randn(argument.shape, generator=generator)
        if argument.values is None
        else torch.from_numpy(argument.values)
        for argument in arguments
    )
    return [argument.name for argument in arguments], tensors


# MODULE:FACTORY arguments as torch modules, and what torch has against them in one line.

_WEIGHTS = (".pth", ".pt", ".ckpt", ".bin", ".safetensors")
_NAMED = 8  # names that a note lists


def check_reference(reference: str, argument: str = "MODULE:FACTORY") -> None:
    """Raise UsageError for a MODULE:NAME that cannot be meant, before anything slow is imported."""
    module_name, separator, attribute = reference.partition(":")
    if reference.endswith(".onnx") and not separator:
        raise UsageError(
            f"{argument}: got the ONNX file {reference!r}, expected a function that builds a torch module; to fold a file: "
            f"bnexport fold {reference} OUT.onnx"
        )
    if reference.endswith(_WEIGHTS) and not separator:
        raise UsageError(
            f"{argument}: got the file of weights {reference!r}, expected a function that builds the module; then "
            f"--checkpoint {reference}"
        )
    path, extension, _ = module_name.partition(".py")
    if extension and (separator or os.path.isfile(reference)):
        folder, stem = os.path.split(path)
        place = f", and run it in the folder {folder!r} or with that on PYTHONPATH" if folder else ""
        raise UsageError(
            f"{argument}: got the file {module_name!r}, expected a module: write {stem}:{attribute or 'FUNCTION'}{place}"
        )
    if "?" in attribute:
        raise UsageError(
            f"{argument}: got {reference!r}; arguments behind ? are for models of {', '.join(LIBRARIES)}; write a function "
            "without arguments that builds the module"
        )
    if not separator or not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise UsageError(f"{argument}: got {reference!r}, expected such as models.resnet:digits_resnet")
    shown = f"{argument} {reference}" if argument.startswith("--") else reference
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    top = module_name.partition(".")[0]
    if not _is_installed(top):
        raise UsageError(
            f"{shown}: cannot be imported: No module named {top!r}; "
            f"modules are looked for in {folder!r} and on PYTHONPATH"
        )


def imported(reference: str, shown: str) -> Any:
    """Import what MODULE:NAME names. Raises UsageError. shown: how messages name it."""
    check_reference(reference)
    module_name, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        place = f"; modules are looked for in {os.getcwd()!r} and on PYTHONPATH" if error.name == module_name else ""
        raise UsageError(f"{shown}: cannot be imported: {error}{place}") from error
    except Exception as error:
        near = suggestion(attribute, dir(sys.modules.get(module_name))) if isinstance(error, AttributeError) else ""
        raise UsageError(f"{shown}: cannot be imported: {summary(error)}{near}") from error


def build(factory: str) -> Any:
    """Build the module that MODULE:FACTORY names; raise UsageError with the factory's own error."""
    import torch

    target = imported(factory, factory)
    if isinstance(target, torch.nn.Module):
        return target
    if not callable(target):
        raise UsageError(
            f"{factory}: got a {type(target).__name__}, expected a function that returns a torch.nn.Module"
        )
    try:
        model = target()
    except Exception as error:
        raise UsageError(
            f"{factory}: calling it without arguments failed: {summary(error)}; "
            "write a function of your own that builds the module"
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{factory}: returned a {type(model).__name__}, expected a torch.nn.Module")
    return model


def load_weights(model: Any, path: Path, key: str | None, allow_unexpected: bool) -> None:
    """Load a checkpoint into the module, and say what was taken and what was not."""
    from bnexport.exporting.checkpoint import load_checkpoint

    loaded = load_checkpoint(model, path, key=key, allow_unexpected=allow_unexpected)
    detail(f"weights of {path}, from {loaded.container or 'the top'!r}, without {loaded.prefix!r}")
    if loaded.others:
        others = ", ".join(repr(name) if name else "the top" for name in loaded.others)
        say(f"note: {path}: the weights are those of {loaded.container or 'the top'!r}; {others} has others (--key)")
    for what, names in (("objects that were not built", loaded.ignored_objects), ("unexpected", loaded.unexpected)):
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            say(f"note: {path}: {what}: {', '.join(names[:_NAMED])}{more}")


@contextlib.contextmanager
def calm() -> Iterator[None]:
    """Without the warnings and graphs that torch prints, unless -v asks for them; our own notes are in the result."""
    if is_verbose():
        yield
        return
    unread = io.StringIO()
    with contextlib.redirect_stdout(unread), contextlib.redirect_stderr(unread):
        yield


# Names of models in known libraries, LIBRARY:MODEL?option=value, read without importing torch.


@dataclasses.dataclass(frozen=True)
class ModelName:
    """A model of a library. text: as it was given."""

    text: str
    library: str
    target: str
    options: dict[str, Any]


def parse_name(text: str) -> ModelName | None:
    """Return the parts of LIBRARY:MODEL?option=value&option=value; None where `text` names no known library.

    Raises:
        UsageError: the model or an option is missing, or the file that it names does not exist.
        MissingDependencyError: the library is not installed.
    """
    library, separator, rest = text.partition(":")
    if not separator or library not in LIBRARIES:
        return None
    known = LIBRARIES[library]
    target, question, query = rest.partition("?")
    options: dict[str, Any] = {}
    for part in query.split("&") if question else ():
        key, equals, value = part.partition("=")
        if not key or not equals:
            raise UsageError(f"{text}: got option {part!r}, expected such as {library}:{target}?in_channels=1")
        options[key] = _value(value)
    if not target:
        raise UsageError(f"{text}: got no model behind {library}:, expected such as {known.example}")
    if known.local and not Path(target).exists():
        raise MissingFileError(f"{text}: no such file {target!r}; a configuration is read from this machine only")
    if not _is_installed(library):
        needs = f"needs {library}, which is not installed; pip install {known.install}"
        raise MissingDependencyError(f"{text}: {needs}")
    return ModelName(text, library, target, options)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # A module without a spec, or one that may not be imported.
        return sys.modules.get(package) is not None


def _value(text: str) -> Any:
    """Return a number, None, True, a tuple or the like; a string where it is none of them."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def build_named(name: ModelName, arguments: list[Argument]) -> tuple[Any, list[Argument]]:
    """Build the model that `name` means, and return it with its example inputs: `arguments`, or what its library states.

    Libraries that could download something find themselves offline.

    Raises:
        UsageError: the library cannot build it, or states no input size.
        MissingDependencyError: a package that the model needs is not installed.
    """
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[variable] = "1"
    from bnexport.exporting import builders
    from bnexport.exporting.arguments import input_names

    with calm():
        built = builders.build(name.library, name.target, name.options, shown=name.text)
    for note in built.notes:
        say(f"note: {note}")
    if arguments:
        return built.module, arguments
    if built.shape is None:
        raise missing_input(name.text)
    (given,) = input_names(built.module, 1)
    say(f"note: input {given}:{','.join(map(str, built.shape))}, as {name.library} states; --input gives another")
    return built.module, [Argument(given, built.shape, None)]


def module_of(
    text: str,
    argument: str,
    arguments: list[Argument],
    checkpoint: Path | None,
    key: str | None,
    allow_unexpected: bool,
) -> tuple[Any, list[Argument]]:
    """Build the module that `text` names, with its weights; return it with its example inputs, as `build_named` does.

    argument: the name of the command's argument, for messages.
    """
    name = parse_name(text)
    if name is None:
        check_reference(text, argument)
    # What a factory prints is no data.
    with contextlib.redirect_stdout(sys.stderr), status("importing torch"):
        module, arguments = (build(text), arguments) if name is None else build_named(name, arguments)
        if checkpoint is not None:
            load_weights(module, checkpoint, key, allow_unexpected)
        elif name is not None:
            say(f"note: the weights of {text} are random; --checkpoint loads trained ones")
    return module, arguments
