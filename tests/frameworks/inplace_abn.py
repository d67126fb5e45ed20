"""The real inplace_abn, in inference, in a training step and exported, next to its conversion; and its stand-in."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import bnexport
from tests.frameworks import stand_ins
from tests.frameworks.environment import Skipped
from tests.sync_bn import lookalikes

CASES = (
    *((name, activation) for name in ("ABN", "InPlaceABN") for activation in ("leaky_relu", "elu", "identity")),
    ("ABN", "relu"),
    ("InPlaceABNSync", "leaky_relu"),
)


def network(norm: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.normal_(norm.bias)
    nn.init.normal_(norm.running_mean, std=0.1)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    with torch.no_grad():
        norm.weight[0] *= -1
    return nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), norm, nn.Conv2d(6, 2, 1))


def trained(net: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, gradients and statistics of a step."""
    x = x.clone().requires_grad_()
    y = net.train()(x)
    y.square().mean().backward()
    tensors = {"output": y.detach(), "input": x.grad, **{name: value.grad for name, value in net.named_parameters()}}
    return tensors | {name: value for name, value in net.named_buffers() if name.endswith(("mean", "var"))}


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def attributes(norm: nn.Module) -> set[str]:
    return {name for name in vars(norm) if not name.startswith("_")}


def the_conversion_equals_it(folder: Path) -> None:
    stand_ins.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        import inplace_abn
    except ImportError as error:
        raise Skipped(f"inplace_abn could not be built: {error}") from error
    for name, activation in CASES:
        # Made twice: its process group cannot be copied.
        net, twin = (network(getattr(inplace_abn, name)(6, activation=activation)) for _ in range(2))
        converted = bnexport.convert_sync_batchnorm(twin)
        x = torch.randn(4, 3, 9, 7)
        with torch.no_grad():
            assert difference(converted.eval()(x), net.eval()(x)) < 1e-6, name
        result = bnexport.export(net.eval(), x, folder / f"{name} {activation}.onnx")
        assert result.verification.passed and result.verification.reference == "original"
        assert [result.report.before.sync_batch_norm, result.report.after.batch_norm] == [1, 0]
        if "Sync" not in name:  # which trains on CUDA only: its CPU build lacks a function
            theirs, ours = trained(net, x), trained(converted, x)
            # The weight of an InPlaceABN is |weight| + eps in the conversion: a gradient may have the other sign.
            ours["1.weight"], theirs["1.weight"] = ours["1.weight"].abs(), theirs["1.weight"].abs()
            differences = {each: difference(ours[each], value) for each, value in theirs.items()}
            assert len(differences) == 9 and max(differences.values()) < 1e-5, (name, activation, differences)
    real, stand_in = inplace_abn.ABN(4, activation="relu"), lookalikes.ABN(4)
    assert attributes(stand_in) == attributes(real) and stand_in.state_dict().keys() == real.state_dict().keys()
    sync = inplace_abn.InPlaceABNSync(4, activation="leaky_relu")
    assert attributes(sync) - attributes(real) == {"group"}
