"""Function fold_module: copy, trace, fold, trace again, compare."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from bnexport.errors import UnsupportedModelError, UsageError, VerificationError
from bnexport.folding.module import parts, tracing
from bnexport.folding.module.branches import Merger
from bnexport.folding.module.folder import ModuleFolder, ModuleOptions
from bnexport.folding.reporting.counts import Counts
from bnexport.folding.reporting.report import FoldReport, SiteReport
from bnexport.folding.rules.parallel import NAME as PARALLEL
from bnexport.folding.selection import as_names, check_names
from bnexport.sync_bn.convert import become, replace, split_activation, to_plain
from bnexport.sync_bn.copies import copy_model
from bnexport.sync_bn.recognition import is_sync_batch_norm
from bnexport.torch_versions import BatchNormBase
from bnexport.verification import modules
from bnexport.verification.torch_modules.proof import ModuleFold, prove_module
from bnexport.verification.verdict import Method, as_method


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
            whole = modules.compare(original, copy_model(folded, share_parameters=True), inputs)
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
    first = parts.trace(work, inputs)
    merged = _merge_branches(work, first, _with_names(options, inner))
    sites = (
        merged + ModuleFolder(work, parts.trace(work, inputs) if merged else first, _with_names(options, inner)).run()
    )
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


def _merge_branches(work: nn.Module, trace: tracing.Trace, options: ModuleOptions) -> list[SiteReport]:
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


def _trace_again(work: nn.Module, inputs: tuple[torch.Tensor, ...] | None, first: tracing.Trace, folded: str) -> None:
    """Trace the folded model and check that it takes the same path: code may ask for a batch norm's attributes or
    class.
    """
    second = parts.trace_again(work, inputs)
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
