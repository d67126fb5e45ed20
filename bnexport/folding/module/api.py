"""Function fold_module: copy, trace, fold, trace again, compare."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx, nn

from bnexport.errors import UnsupportedModelError, UsageError, VerificationError
from bnexport.folding.folder import as_names, check_names
from bnexport.folding.module import layers
from bnexport.folding.module.branches import Merger
from bnexport.folding.module.edits import ModuleFolder, ModuleOptions
from bnexport.folding.module.layers import Trace, has_hooks
from bnexport.folding.report import Counts, FoldReport, SiteReport
from bnexport.folding.rules.parallel import NAME as PARALLEL
from bnexport.modules.copies import copy_model
from bnexport.sync_bn.convert import become, replace, split_activation, to_plain
from bnexport.sync_bn.recognition import is_sync_batch_norm
from bnexport.torch_versions import BatchNormBase
from bnexport.verification import module_proof
from bnexport.verification.module_proof import ModuleFold, prove_module
from bnexport.verification.verdict import Method, as_method

# Uses of submodules by the code of a module, read from its source.
#
# For modules that torch.fx cannot trace. A use of a submodule is a call, `self.body(x)`, or anything else: its layers
# taken by index, its weights read, the module handed to a function. What the reader does not understand counts as a use
# of everything below, so that a module that only has calls is reached in no other way.
#
# Understood: attributes of self and of modules below it, methods and properties of their classes, super(), indices into
# and loops over ModuleList (loops over Sequential, too). A call of an outside function counts with what it is handed.

_LISTS = (nn.ModuleList, nn.ModuleDict)
# A class that has one of these of its own decides itself what a call or an attribute is.
_ACCESS = ("__call__", "__getattr__", "__getattribute__")
_MISSING: Any = object()


@dataclasses.dataclass
class Reach:
    """called: submodules that are called, with whether it is always with one positional argument. used: the others."""

    called: dict[nn.Module, bool] = dataclasses.field(default_factory=dict)
    used: set[nn.Module] = dataclasses.field(default_factory=set)

    def call(self, module: nn.Module, simple: bool) -> None:
        self.called[module] = self.called.get(module, True) and simple


def read(module: nn.Module) -> Reach:
    """Find the submodules that a call of `module` uses, and how. The code of called modules is not read."""
    reach = Reach()
    own_rules = any(getattr(type(module), name) is not getattr(nn.Module, name) for name in _ACCESS)
    if own_rules or isinstance(module, torch.jit.ScriptModule) or has_hooks(module) or "forward" in module.__dict__:
        reach.used.add(module)
    else:
        _SourceReader(reach).method(module, type(module).forward)
    return reach


class _SourceReader:
    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._done: set[tuple[nn.Module, Any]] = set()

    def method(self, owner: nn.Module, function: Any) -> None:
        """Read a function whose first parameter is `owner`."""
        if (owner, function) in self._done:
            return
        self._done.add((owner, function))
        if function is nn.Sequential.forward:
            for child in owner.children():
                self._reach.call(child, True)
            return
        try:
            code = _Code.of(function)
        except (OSError, SyntaxError, TypeError, ValueError, AttributeError):  # no source, or not a plain function
            self._reach.used.add(owner)
            return
        for node in code.uses_of_owner():
            if not self._use(owner, node, code):
                self._reach.used.add(owner)
        for called in code.super_calls():
            target = None if called is None else _after(type(owner), code.defining_class(), called)
            if target is None:
                self._reach.used.add(owner)
            else:
                self.method(owner, target)

    def _use(self, owner: nn.Module, name: ast.Name, code: _Code) -> bool:
        """Follow self.a.b.c from self on; return whether it was understood."""
        module, node = owner, cast(ast.expr, name)
        while isinstance(attribute := code.parent(node), ast.Attribute):
            child = module._modules.get(attribute.attr, _MISSING)
            if not isinstance(attribute.ctx, ast.Load):
                return child is _MISSING
            if child is None:
                return True
            if not isinstance(child, nn.Module):
                if module is owner:
                    return self._attribute(owner, attribute.attr)
                self._reach.used.add(module)
                return True
            module, node = child, attribute
        if module is owner:
            return False
        self._use_module(module, node, code)
        return True

    def _use_module(self, module: nn.Module, node: ast.expr, code: _Code) -> None:
        if code.asks_for_presence(node):
            return
        call = code.call_of(node)
        if call is not None:
            self._reach.call(module, _is_simple(call))
            return
        calls = code.calls_of_items(node, type(module))
        if calls is None:
            self._reach.used.add(module)
            return
        for child in module.children():
            for item in calls:
                self._reach.call(child, _is_simple(item))

    def _attribute(self, owner: nn.Module, name: str) -> bool:
        """Read an attribute of self that is not a submodule; return whether it was understood."""
        if name in owner._parameters or name in owner._buffers:
            return True
        value = inspect.getattr_static(type(owner), name, _MISSING)
        if isinstance(value, property):
            self.method(owner, value.fget)
        elif name in owner.__dict__:
            self._reach.used.update(_modules_in(owner.__dict__[name]))
        elif isinstance(value, types.FunctionType):
            self.method(owner, value)
        elif not isinstance(value, (staticmethod, classmethod)):
            # A descriptor of another kind may return a module, as may __dict__.
            return not (value is _MISSING or hasattr(type(value), "__get__") or _modules_in(value))
        return True


class _Code:
    """Source of one function as a syntax tree."""

    def __init__(self, function: types.FunctionType, tree: ast.FunctionDef) -> None:
        self._function = function
        self.owner = tree.args.posonlyargs[0].arg if tree.args.posonlyargs else tree.args.args[0].arg
        self._nodes = list(ast.walk(tree))
        self._parents = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}

    @classmethod
    def of(cls, function: Any) -> _Code:
        """Parse a function. Raise what inspect and ast raise, or ValueError for code that hides its use of self."""
        while hasattr(function, "__wrapped__"):
            if not str(function.__globals__.get("__name__")).startswith("torch."):
                raise ValueError("a decorator may do anything")
            function = function.__wrapped__
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        if not isinstance(tree, ast.FunctionDef) or not (tree.args.posonlyargs or tree.args.args):
            raise ValueError("no method")
        code = cls(function, tree)
        code._check()
        return code

    def _check(self) -> None:
        """Check that self is never rebound, that all uses are named, and that the source matches the code."""
        names = {
            getattr(node, field, "") for node in self._nodes for field in ("id", "attr", "name", "module", "asname")
        }
        if not set(self._function.__code__.co_names) <= names:
            raise ValueError("another version of the source, or code that was rewritten")
        for node in self._nodes:
            if isinstance(node, ast.Name) and node.id == self.owner and not isinstance(node.ctx, ast.Load):
                raise ValueError("self is set")
            inner = isinstance(node, ast.arg) and self._parents[self._parents[node]] is not self._nodes[0]
            if inner and cast(ast.arg, node).arg == self.owner:
                raise ValueError("self of another function")
            if isinstance(node, ast.Name) and node.id in ("eval", "exec", "locals", "globals", "vars"):
                raise ValueError("names that are computed")

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(node)

    def defining_class(self) -> Any:
        """Return the class whose body contains the function; known to functions that use super."""
        captured = dict(zip(self._function.__code__.co_freevars, self._function.__closure__ or ()))
        return captured["__class__"].cell_contents if "__class__" in captured else None

    def uses_of_owner(self) -> Iterator[ast.Name]:
        for node in self._nodes:
            if isinstance(node, ast.Name) and node.id == self.owner:
                yield node

    def super_calls(self) -> Iterator[str | None]:
        """Return names of the methods called as super().name(...); None for any other use of super."""
        for node in self._nodes:
            if isinstance(node, ast.Name) and node.id == "super":
                call = self.parent(node)
                attribute = self.parent(call) if isinstance(call, ast.Call) and not call.args else None
                known = isinstance(attribute, ast.Attribute) and self.call_of(attribute) is not None
                yield attribute.attr if known and isinstance(attribute, ast.Attribute) else None

    def asks_for_presence(self, node: ast.AST) -> bool:
        """Whether the code is a test such as `if self.body:` or `self.body is None`."""
        parent = self.parent(node)
        if isinstance(parent, (ast.If, ast.IfExp)):
            return parent.test is node
        if not isinstance(parent, ast.Compare):
            return False
        none = all(isinstance(value, ast.Constant) and value.value is None for value in parent.comparators)
        return none and all(isinstance(operator, (ast.Is, ast.IsNot)) for operator in parent.ops)

    def call_of(self, node: ast.AST) -> ast.Call | None:
        """Return the call whose function is `node`."""
        parent = self.parent(node)
        return parent if isinstance(parent, ast.Call) and parent.func is node else None

    def calls_of_items(self, node: ast.expr, container: type) -> list[ast.Call] | None:
        """Return every call of an item of the list `node`; None if its items are used otherwise."""
        parent = self.parent(node)
        if isinstance(parent, ast.Subscript) and parent.value is node and container in _LISTS:
            call = self.call_of(parent)
            return None if call is None else [call]
        if container not in (nn.ModuleList, nn.Sequential):
            return None
        target = self._loop_target(node)
        return None if target is None else self._calls_of_variable(target)

    def _loop_target(self, node: ast.expr) -> ast.Name | None:
        """Return the loop variable over the items: for x in node, or in enumerate and zip of it."""
        loop, place = self.parent(node), None
        if isinstance(loop, ast.Call) and isinstance(loop.func, ast.Name) and not loop.keywords:
            if loop.func.id == "enumerate" and loop.args == [node]:
                place = 1
            elif loop.func.id == "zip" and not any(isinstance(value, ast.Starred) for value in loop.args):
                place = loop.args.index(node)
            else:
                return None
            node, loop = loop, self.parent(loop)
        if not isinstance(loop, (ast.For, ast.comprehension)) or loop.iter is not node:
            return None
        target: ast.expr = loop.target
        if place is not None:
            if not isinstance(target, ast.Tuple) or any(isinstance(part, ast.Starred) for part in target.elts):
                return None
            target = target.elts[place]
        return target if isinstance(target, ast.Name) else None

    def _calls_of_variable(self, target: ast.Name) -> list[ast.Call] | None:
        calls = []
        for node in self._nodes:
            if isinstance(node, ast.Name) and node.id == target.id and isinstance(node.ctx, ast.Load):
                call = self.call_of(node)
                if call is None:
                    return None
                calls.append(call)
        return calls


def _is_simple(call: ast.Call) -> bool:
    return len(call.args) == 1 and not call.keywords and not isinstance(call.args[0], ast.Starred)


def _after(cls: type, defining: Any, name: str) -> Callable[..., Any] | None:
    """Return the function that super().name finds from within `defining`, or None."""
    order = cls.__mro__
    if defining not in order:
        return None
    for base in order[order.index(defining) + 1 :]:
        if name in base.__dict__:
            value = base.__dict__[name]
            return value if isinstance(value, types.FunctionType) else None
    return None


def _modules_in(value: Any, depth: int = 4) -> set[nn.Module]:
    """Yield the modules reachable from a value: itself, in containers, as a method's object or in an object's
    attributes.

    What a function captures is left out: a copy of a model copies its functions by reference, so they hold other modules.
    """
    if isinstance(value, nn.Module):
        return {value}
    if depth == 0 or value is None or isinstance(value, (type, types.ModuleType, torch.Tensor, str, bytes, int, float)):
        return set()
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = list(value)
    elif isinstance(value, functools.partial):
        inner = [value.func, value.args, value.keywords]
    elif isinstance(value, types.MethodType):
        inner = [value.__self__]
    elif hasattr(value, "__dict__") and not isinstance(value, types.FunctionType):
        inner = list(vars(value).values())
    return {module for part in inner for module in _modules_in(part, depth - 1)}


# Tracing of a model as a whole by torch.fx, or else of its self-contained submodules.
#
# A submodule of code that cannot be traced is a part if it is traced on its own, and if all that the code does with it
# is to call it with one input (`reach`): then each of its batch norms gets its input from the same layer in every call,
# whatever the code around it decides. What a part gets is not known to be a tensor, nor is its rank.


def trace(model: nn.Module, example_inputs: tuple[torch.Tensor, ...] | None) -> Trace:
    """Trace `model` and the parts of its opaque submodules, as `tracing.trace`.

    Raises UnsupportedModelError where the outermost forward cannot be traced and no part has a batch norm.
    """
    found, failure = _trace(model, example_inputs, shapes=True)
    parts = [model.get_submodule(path) for path in found.parts]
    if failure is not None and not any(
        isinstance(module, BatchNormBase) for part in parts for module in part.modules()
    ):
        raise failure
    return found


def trace_again(model: nn.Module, example_inputs: tuple[torch.Tensor, ...] | None) -> Trace:
    """Trace a model without shapes after its batch norms were folded."""
    return _trace(model, example_inputs, shapes=False)[0]


def _trace(
    model: nn.Module, example_inputs: tuple[torch.Tensor, ...] | None, *, shapes: bool
) -> tuple[Trace, UnsupportedModelError | None]:
    failure = None
    try:
        found = layers.trace(model, example_inputs, shapes=shapes)
    except UnsupportedModelError as error:
        failure = error
        if shapes and example_inputs is not None:
            layers.run(copy_model(model, share_parameters=True), example_inputs)
        found = Trace((), {}, {"": layers.reason(error)}, frozenset(), (), {})
    paths = {module: path for path, module in model.named_modules()}
    for part, inner in _Search(model).run(model.get_submodule(path) for path in found.opaque).items():
        found = _joined(found, paths[part], inner)
    return found, failure


class _Search:
    """Search for traceable parts below modules that cannot be traced."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._read: set[nn.Module] = set()  # modules whose code `reach` has read
        self._called: set[nn.Module] = set()
        self._used: set[nn.Module] = set()
        self._parts: dict[nn.Module, Trace] = {}

    def run(self, opaque: Iterable[nn.Module]) -> dict[nn.Module, Trace]:
        self._read_all(opaque)
        while unfit := [part for part, inner in self._parts.items() if not self._is_whole(part, inner)]:
            for part in unfit:
                del self._parts[part]
            self._read_all(unfit)
        return self._parts

    def _read_all(self, pending: Iterable[nn.Module]) -> None:
        """Read the code of modules, and of the modules that they call and that are no parts."""
        queue = list(pending)
        while queue:
            module = queue.pop()
            if module in self._read:
                continue
            self._read.add(module)
            uses = read(module)
            self._used.update(below for used in uses.used for below in used.modules())
            for child, simple in uses.called.items():
                self._called.add(child)
                if not simple:
                    self._used.add(child)
                if child in self._parts or child in self._read or _is_torch_layer(child):
                    continue
                inner = _trace_alone(child) if simple else None
                if inner is None:
                    queue.append(child)
                else:
                    self._parts[child] = inner
                    queue += [child.get_submodule(path) for path in inner.opaque]

    def _is_whole(self, part: nn.Module, inner: Trace) -> bool:
        """Whether code outside the trace only calls `part` itself."""
        hidden = {module for path in inner.opaque for module in part.get_submodule(path).modules()}
        seen = set(part.modules()) - hidden
        if part in self._used or (seen - {part}) & (self._called | self._used):
            return False
        owners = (owner for owner in self._model.modules() if owner not in seen and owner not in hidden)
        return not any(child in seen and child is not part for owner in owners for child in owner.children())


def _is_torch_layer(module: nn.Module) -> bool:
    return not module._modules and type(module).__module__.startswith("torch.nn.modules.")


def _trace_alone(module: nn.Module) -> Trace | None:
    try:
        return layers.trace(module, None, shapes=False, count=1)
    except UnsupportedModelError:
        return None


def _joined(whole: Trace, path: str, part: Trace) -> Trace:
    """Return `whole` extended by the graph of the submodule at `path`."""

    def full(inner: str) -> str:
        return f"{path}.{inner}" if inner else path

    paths: dict[fx.Node, str] = {node: full(inner) for node, inner in part.paths.items() if inner}
    return dataclasses.replace(
        whole,
        graphs=whole.graphs + part.graphs,
        paths=whole.paths | paths,
        opaque=whole.opaque | {full(inner): reason for inner, reason in part.opaque.items()},
        seen_by_hooks=whole.seen_by_hooks | part.seen_by_hooks,
        read=whole.read + tuple(full(inner) for inner in part.read),
        parts=(*whole.parts, path),
    )


def fold_module(
    model: nn.Module,
    example_inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
    *,
    verify: bool | Method = True,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    max_scale: float = 1e6,
) -> nn.Module:
    """Copy `model` for inference and fold its batch norms into the neighbouring layers.

    Every batch norm that `convert_sync_batchnorm` knows is taken with its running statistics, whatever
    mode the module is in. It is folded into the Conv1d/2d/3d, ConvTranspose1d/2d/3d or Linear that makes
    its input, else into those that read its output, where that is provably the same function; an
    Identity takes its place. Sums of parallel branches of one value become one convolution where that
    costs no more; the modules of the other branches return a zero without dimensions. The algebra is
    float64, rounded once. The copy keeps the model's classes, code and hooks, is in eval mode, and shares
    no memory with `model`, which stays as it is.

    Where values go is found by torch.fx. Of a module that it cannot trace, only those submodules are folded that it
    traces on their own and that the source of the module uses in no other way than to call them with one input.
    Convolutions are taken to get batches, as batch norms do, unless example_inputs show otherwise; a
    Linear takes a map only where they show its rank, since in (N, L, C) a batch norm's channels are L.

    Args:
        example_inputs: a tensor, or those of the positional parameters. Other parameters keep their
            defaults, and it is for such calls that the folded module equals the model.
        verify: "local" proves each fold where it stands, in float64, and that everything else is the same; "whole" runs
            both modules on example_inputs and compares, hooks run, too; "both" does both. True is "both" where
            example_inputs are given and "local" elsewhere, False is nothing.
        only: paths of the batch norms to fold, as the report shows them; None for all. `parallel` stands for all merges
            of branches.
        skip: paths of batch norms to leave alone; `parallel` for branches.
        max_scale: largest |gamma| / sqrt(var + eps) that is folded.

    Returns the module; its attribute `fold_report` (a FoldReport) tells what happened to each batch norm.

    Raises:
        UsageError: an argument is wrong, or the model fails on example_inputs.
        UnsupportedModelError: torch.fx cannot trace the model's own forward, nor a part of it with a batch norm.
        VerificationError: the folded module differs from the model by more than the tolerance.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    inputs = _inputs(example_inputs)
    options = ModuleOptions(None if only is None else as_names("only", only), as_names("skip", skip), max_scale)
    method = as_method(verify)
    if verify == "whole" and inputs is None:
        raise UsageError('verify: got "whole", which needs example_inputs; expected "local", or example_inputs')
    folded, report = fold_copy(model, inputs, options, prove=method not in (None, "whole"))
    if method is not None and report.changed:
        result = report.verification
        if method != "local" and inputs is not None and (result is None or result.status != "failed"):
            original = copy_model(model, share_parameters=True).eval()
            whole = module_proof.compare(original, copy_model(folded, share_parameters=True), inputs)
            result = whole if result is None else result.joined(whole)
        if result is not None and result.status == "failed":
            raise VerificationError(f"the folded module differs from the original: {result.reason}")
        report = dataclasses.replace(report, verification=result)
    folded.fold_report = report  # type: ignore[assignment]
    return folded


def fold_copy(
    model: nn.Module, inputs: tuple[torch.Tensor, ...] | None, options: ModuleOptions, *, prove: bool = False
) -> tuple[nn.Module, FoldReport]:
    """Fold a copy; return it and its report, not compared with `model`. prove: each fold, where it stands."""
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(f"model: got a {type(model).__name__}; fold the module that it was made from")
    training = {path for path, module in model.named_modules() if module.training}
    classes = {path: type(module).__name__ for path, module in model.named_modules()}
    work = replace(copy_model(model), functools.partial(to_plain, split=True)).eval()
    before = _count(model)
    norms = [path for path, module in work.named_modules() if isinstance(module, BatchNormBase)]
    for option, names in (("only", options.only or frozenset()), ("skip", options.skip)):
        check_names(option, names - {PARALLEL}, norms, norms, "the model")
    taken_apart = _take_activations_apart(work)
    inner = {path: f"{path}.norm" for path in taken_apart}
    unfolded = copy_model(work, share_parameters=True) if prove else None
    first = trace(work, inputs)
    merged = _merge_branches(work, first, _with_names(options, inner))
    sites = merged + ModuleFolder(work, trace(work, inputs) if merged else first, _with_names(options, inner)).run()
    folds = _folds(sites)
    proof = None if unfolded is None or not folds else prove_module(unfolded, work, inputs, folds)
    outer = {path: name for name, path in inner.items()}
    sites = [dataclasses.replace(site, nodes=tuple(outer.get(path, path) for path in site.nodes)) for site in sites]
    folded = ", ".join(site.nodes[0] for site in sites if site.outcome == "folded")
    if folded:
        _trace_again(work, inputs, first, folded)
    for module, kind, state in taken_apart.values():
        if isinstance(module.norm, BatchNormBase):
            become(module, kind, state)
    report = FoldReport(
        sites=tuple(_as_in_the_source(site, classes, training) for site in sites),
        before=before,
        after=_count(work),
        meaning_changed=any(site.outcome == "folded" and site.nodes[0] in training for site in sites),
        verification=proof,
    )
    return work, report


def _folds(sites: Iterable[SiteReport]) -> list[ModuleFold]:
    """Return what the proof is given of each site that changed."""
    changed = (site for site in sites if site.changed)
    return [ModuleFold(" + ".join(site.nodes), (*site.nodes, *site.targets)) for site in changed]


def _merge_branches(work: nn.Module, trace: layers.Trace, options: ModuleOptions) -> list[SiteReport]:
    """Merges parallel branches in place, unless the caller leaves them alone."""
    only = options.only
    if PARALLEL in options.skip:
        return []

    def allowed(norms: list[str]) -> bool:
        chosen = only is None or PARALLEL in only or (bool(norms) and only.issuperset(norms))
        return chosen and options.skip.isdisjoint(norms)

    return Merger(work, trace, ModuleFolder(work, trace, options).refuse_module, allowed, options.max_scale).run()


def _take_activations_apart(work: nn.Module) -> dict[str, tuple[nn.Module, type[nn.Module], dict[str, Any]]]:
    """Split norms with activations into Sequentials of `norm`, `drop` and `act`; return the original classes, by
    path.
    """
    found = {}
    for path, module in list(work.named_modules()):
        apart = split_activation(module) if path else None
        if apart is not None:
            found[path] = module, type(module), dict(module.__dict__)
            become(module, type(apart), apart.__dict__)
    return found


def _with_names(options: ModuleOptions, names: dict[str, str]) -> ModuleOptions:
    only = None if options.only is None else frozenset(names.get(path, path) for path in options.only)
    return dataclasses.replace(options, only=only, skip=frozenset(names.get(path, path) for path in options.skip))


def _trace_again(work: nn.Module, inputs: tuple[torch.Tensor, ...] | None, first: layers.Trace, folded: str) -> None:
    """Trace the folded model and check that it takes the same path: code may ask for a batch norm's attributes or
    class.
    """
    second = trace_again(work, inputs)
    if second.outline() == first.outline() and second.opaque == first.opaque:
        return
    cause = next(iter(second.opaque.items() - first.opaque.items()), ("", "its code takes another way"))[1]
    raise UnsupportedModelError(
        f"{type(work).__name__}: its forward looks at batch norms other than by calling them, and fails when they are"
        f" folded ({cause}); leave those with skip=[...], folded were {folded}"
    )


def _inputs(example_inputs: torch.Tensor | Sequence[torch.Tensor] | None) -> tuple[torch.Tensor, ...] | None:
    if example_inputs is None:
        return None
    inputs = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    for index, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"example_inputs[{index}]: got {type(value).__name__}, expected a torch.Tensor")
    return inputs


def _as_in_the_source(site: SiteReport, classes: dict[str, str], training: set[str]) -> SiteReport:
    """Restore the class that the model's author used in a report; a batch norm with an activation was split in two."""
    path = site.nodes[0]
    source = path if path in classes else path.rpartition(".")[0]
    return dataclasses.replace(site, op_type=classes.get(source, site.op_type), training=source in training)


def _count(model: nn.Module) -> Counts:
    """Count the modules without children, identities excluded."""
    modules = list(model.modules())
    sync = sum(is_sync_batch_norm(module) for module in modules)
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return Counts(
        nodes=sum(not module._modules and not isinstance(module, nn.Identity) for module in modules),
        batch_norm=sum(isinstance(module, BatchNormBase) for module in modules) - sync,
        sync_batch_norm=sync,
        parameter_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
    )
