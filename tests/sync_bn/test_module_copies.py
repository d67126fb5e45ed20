"""What a copy of a module shares with it, and what becomes of a process group in copies and pickles."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from bnexport.errors import GroupError, UnsupportedModelError, UsageError
from bnexport.modules.copies import copy_model
from bnexport.sync_bn import SyncBatchNorm, convert_sync_batchnorm


class Connection:
    """Stands for a process group: it can be neither copied nor pickled."""

    def __deepcopy__(self, memo: object) -> None:
        raise AssertionError("a group was copied")


def test_a_copy_has_its_own_parameters_and_the_same_group() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2), SyncBatchNorm(2))
    model[1].process_group = Connection()  # type: ignore[assignment]
    model[2].group = Connection()
    made = copy_model(model)
    assert made[1].process_group is model[1].process_group and made[2].group is model[2].group  # type: ignore[index]
    for one, two in zip(model.parameters(), made.parameters(), strict=True):
        assert one is not two and torch.equal(one, two)


def test_a_copy_may_share_parameters_but_no_buffers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LazyLinear(3))
    made = copy_model(model, share_parameters=True)
    assert made[0].weight is model[0].weight and made[1].bias is model[1].bias  # type: ignore[index]
    assert made[1].running_mean is not model[1].running_mean  # type: ignore[index]
    made(torch.ones(2, 2))  # makes the lazy parameters, in place: of the copy alone
    assert isinstance(model[2].weight, nn.parameter.UninitializedParameter)


def test_results_of_a_forward_are_copied_without_their_history() -> None:
    model = nn.Linear(2, 2)
    model.last = model(torch.ones(1, 2))  # type: ignore[assignment]
    made = copy_model(model)
    assert torch.equal(made.last, model.last) and made.last.is_leaf and made.last is not model.last  # type: ignore[arg-type]


def test_what_cannot_be_copied_is_named() -> None:
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match=r"Linear: cannot be copied, .*lock"):
        copy_model(model)


def test_a_copy_takes_lists_and_unfilled_closures_as_they_are() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.my_hooks = [len]  # type: ignore[assignment]

    def hook(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return later(output) if module is model else output

    model.register_forward_hook(hook)
    made = copy_model(model)
    assert made.my_hooks == [len]
    later = torch.relu
    for one in (made, model):  # the hook of each knows its own model
        y = one(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
        assert torch.equal(y > 0, torch.tensor([[False, False], [True, True]])) and y.min() == 0


def test_copies_share_the_group_and_nothing_else() -> None:
    module = SyncBatchNorm(3)
    module.group = Connection()
    made = copy.deepcopy(module)
    assert made.group is module.group and made.running_mean is not module.running_mean
    assert made._layer != module._layer


def test_a_group_is_lost_in_a_pickle_until_another_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from bnexport.sync_bn import distributed
    from bnexport.sync_bn import module as module_of

    monkeypatch.setattr(module_of.distributed, "name_of", lambda group: "" if group is None else "some group")
    module = SyncBatchNorm(3)
    module.group = Connection()
    made = pickle.loads(pickle.dumps(module))
    assert made.group is None and module.group is not None
    made.eps = 1e-3
    with pytest.raises(GroupError, match="'some group' did not survive pickling"):
        made(torch.ones(2, 3))
    assert made.eval()(torch.ones(2, 3)).shape == (2, 3)
    made.train().group = None
    monkeypatch.setattr(distributed, "size_of", lambda group: 1)
    assert made(torch.ones(2, 3)).shape == (2, 3)


def test_the_number_of_channels_of_a_module_that_does_not_say_it() -> None:
    """As a state_dict has it: that of the statistics or of the weight, and where there is neither, an error."""
    for options in ({"affine": False}, {"track_running_stats": False}, {}):
        module = nn.BatchNorm1d(4, **options)
        del module.num_features
        assert convert_sync_batchnorm(nn.Sequential(module))[0].num_features == 4  # type: ignore[index]
    module = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    del module.num_features
    with pytest.raises(UsageError, match="BatchNorm1d: cannot tell its number of channels"):
        convert_sync_batchnorm(module)
