"""An exported step with what reaches its kinks, for references that go the same way there."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import torch

import bnexport
from bnexport.runtime import engine
from bnexport.training import api, step

Reached = Callable[[Mapping[str, np.ndarray], Sequence[torch.Tensor]], list[np.ndarray | None]]


def export(*arguments: Any, **options: Any) -> tuple[Any, Reached]:
    """bnexport.export_training_step(...), and a function of state and batch: what reaches kinks in its graph, in order."""
    taken: list[ir.Value] = []
    take = api.take
    watched = mock.Mock(side_effect=lambda model: taken.extend(take(model)) or list(taken))
    with mock.patch.object(api, "take", watched):
        result = bnexport.export_training_step(*arguments, **options)
    watched.assert_called_once()
    names = step.kink_names(result.model, taken)
    model = ir.from_proto(ir.to_proto(result.model))
    made = {value.name: value for node in model.graph for value in node.outputs}
    model.graph.outputs[:] = [made[name] for name in dict.fromkeys(names) if name]

    def reached(state: Mapping[str, np.ndarray], batch: Sequence[torch.Tensor]) -> list[np.ndarray | None]:
        if not model.graph.outputs:
            return []
        runtime = engine.open(model, options=engine.default_options(True))
        feeds = {**state, **dict(zip(result.inputs, (tensor.numpy() for tensor in batch))), "lr": np.array(0.0)}
        got = dict(zip(runtime.outputs, runtime.run({name: feeds[name] for name in runtime.inputs}, runtime.outputs)))
        return [got.get(name) for name in names]

    return result, reached
