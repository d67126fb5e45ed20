"""Uses of submodules by the code of a module, read from its source.

For modules that torch.fx cannot trace. A use of a submodule is a call, `self.body(x)`, or anything else: its layers
taken by index, its weights read, the module handed to a function. What the reader does not understand counts as a use
of everything below, so that a module that only has calls is reached in no other way.

Understood: attributes of self and of modules below it, methods and properties of their classes, super(), indices into
and loops over ModuleList (loops over Sequential, too). A call of an outside function counts with what it is handed.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from bnexport.folding.module.tracing import has_hooks

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
