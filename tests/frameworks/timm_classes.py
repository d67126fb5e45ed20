"""Prints the attributes, the state and the submodules of timm's batch norms with activation, as one JSON object."""

from __future__ import annotations

import json

from torch import nn

from tests.frameworks import stand_ins


def main() -> None:
    stand_ins.torchvision()
    from timm.layers import BatchNormAct2d, convert_sync_batchnorm

    plain = BatchNormAct2d(4, act_layer=nn.SiLU)
    sync = convert_sync_batchnorm(BatchNormAct2d(4, act_layer=nn.SiLU))
    print(json.dumps({type(module).__name__: described(module) for module in (plain, sync)}))


def described(module: nn.Module) -> dict[str, object]:
    cls = type(module)
    return {
        "package": cls.__module__.partition(".")[0],
        "base": cls.__mro__[1].__name__,
        "attributes": sorted(name for name in vars(module) if not name.startswith("_")),
        "state": sorted(module.state_dict()),
        "modules": {name: type(child).__name__ for name, child in sorted(module.named_children())},
        "overrides": sorted(name for name, value in vars(cls).items() if callable(value)),
    }


if __name__ == "__main__":
    main()
