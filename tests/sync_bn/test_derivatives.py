"""Forward-mode derivatives and the transforms of torch.func, against torch.nn.BatchNorm2d and finite differences."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from bnexport import SyncBatchNorm
from bnexport.errors import UsageError
from bnexport.sync_bn import operators

X, TANGENT = torch.randn(2, 3, 2, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def pair(training, tracked=False):
    theirs = torch.nn.BatchNorm2d(2, track_running_stats=tracked or not training).double()
    torch.nn.init.normal_(theirs.weight)
    torch.nn.init.normal_(theirs.bias)
    if theirs.running_var is not None:
        torch.nn.init.normal_(theirs.running_mean)
        torch.nn.init.uniform_(theirs.running_var, 0.5, 2)
    ours = SyncBatchNorm(2, track_running_stats=theirs.track_running_stats).double()
    ours.load_state_dict(theirs.state_dict())
    return ours.train(training), theirs.train(training)


def tangent_of(module, dual):
    """The output where the values named in `dual` have tangents."""
    with forward_ad.dual_level():
        given, tangents = dict(module.named_parameters()) | {"x": X}, {"x": TANGENT}
        given |= {name: forward_ad.make_dual(given[name], tangents.get(name, TANGENT[0, :, 0, 0])) for name in dual}
        return forward_ad.unpack_dual(functional_call(module, given, given.pop("x")))


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dual", [("x",), ("x", "weight"), ("weight",), ("bias",)], ids="+".join)
def test_tangents_are_those_of_batch_norm(training, trainable, dual):
    ours, theirs = (module.requires_grad_(trainable) for module in pair(training, tracked=True))
    got, want = (tangent_of(module, dual) for module in (ours, theirs))
    torch.testing.assert_close(got.primal, want.primal)
    torch.testing.assert_close(got.tangent, want.tangent)
    for one, two in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(one, two)


def test_a_dual_level_without_a_tangent_changes_nothing():
    module = SyncBatchNorm(2)
    with forward_ad.dual_level():
        y = module(X.float())
        assert forward_ad.unpack_dual(y).tangent is None
    assert torch.equal(y, module(X.float()))


TRANSFORMS = {
    "jvp": lambda module: jvp(module, (X,), (TANGENT,))[1],
    "grad": lambda module: grad(lambda x: module(x).pow(3).sum())(X),
    "jacrev": lambda module: jacrev(module)(X),
    "jacfwd": lambda module: jacfwd(module)(X),
    "hessian": lambda module: hessian(lambda x: module(x).pow(3).sum())(X),
    "vmap": lambda module: vmap(module)(torch.stack([X, 2 * X + TANGENT])),
    "vmap of grad": lambda module: vmap(grad(lambda x: module(x).pow(3).sum()))(torch.stack([X, 2 * X + TANGENT])),
    "grad by parameters": lambda module: grad(lambda given: functional_call(module, given, X).pow(3).sum())(
        dict(module.named_parameters())
    )["weight"],
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_give_what_they_give_for_batch_norm(name, training):
    ours, theirs = pair(training)
    torch.testing.assert_close(TRANSFORMS[name](ours), TRANSFORMS[name](theirs))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_forward_over_reverse_and_reverse_over_forward(training):
    """By finite differences: torch.nn.BatchNorm2d's own derivative of a tangent is not symmetric."""
    module = pair(training)[0]

    def function(x):
        return module(x).pow(3).sum()

    assert torch.autograd.gradcheck(module, X.requires_grad_(), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(module, X, check_fwd_over_rev=True)
    torch.testing.assert_close(jacrev(jacfwd(function))(X), hessian(function)(X))
    X.requires_grad_(False)


def normalised(x, weight, bias):
    """Batch norm in training, in operations that autograd differentiates as often as it likes."""
    mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
    return (x - mean) * (var + 1e-5).rsqrt() * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)


@pytest.mark.parametrize("order", [2, 3, 4])
def test_derivatives_of_any_order(order):
    module = pair(True)[0]

    def last(function):
        inputs = [X.clone().requires_grad_(), *(p.detach().clone().requires_grad_() for p in module.parameters())]
        loss = function(*inputs).pow(3).sum()
        for _ in range(order - 1):
            loss = sum(g.sin().sum() for g in torch.autograd.grad(loss, inputs, create_graph=True))
        return torch.autograd.grad(loss, inputs)

    ours = last(lambda x, weight, bias: functional_call(module, {"weight": weight, "bias": bias}, x))
    for got, want in zip(ours, last(normalised), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9 * float(want.abs().max()))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_batches_of_gradients(training):
    module = pair(training)[0]
    x = X.clone().requires_grad_()
    assert torch.autograd.gradcheck(module, x, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(module, x, check_batched_grad=True)
    jacobian = torch.autograd.functional.jacobian(module, X, vectorize=True)
    torch.testing.assert_close(jacobian, jacrev(module)(X))


@pytest.mark.parametrize("shape", [(0, 2, 2), (3, 0, 2)], ids=str)
def test_empty_batches_have_empty_tangents(shape):
    module, x = SyncBatchNorm(shape[1]), torch.randn(shape)
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(module(forward_ad.make_dual(x, x)))
    assert y.tangent.shape == shape
    assert torch.equal(module.running_mean, torch.zeros(shape[1]))


def test_the_gradient_of_a_backward_that_was_not_transformed():
    """A tangent that comes in with the gradient alone."""
    module, x = pair(True)[0], X.clone().requires_grad_()
    y = module(x)
    with forward_ad.dual_level():
        (dx,) = torch.autograd.grad(y, x, forward_ad.make_dual(X, TANGENT))
        got = forward_ad.unpack_dual(dx).tangent
    torch.testing.assert_close(got, torch.autograd.grad(module(x), x, TANGENT)[0])


def test_a_group_refuses_tangents():
    group = ("world", 2, "exact", "local", 0)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="group of 2 processes"):
        dual = forward_ad.make_dual(X, TANGENT)
        operators.sync_batch_norm(dual, None, None, None, None, True, 0.1, 1e-5, *group)


def test_training_under_vmap_says_that_the_statistics_exist_once():
    with pytest.raises(UsageError, match=r"under vmap.*track_running_stats=False"):
        vmap(SyncBatchNorm(2))(torch.randn(2, 3, 2, 2))
