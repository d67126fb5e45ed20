"""The mask: the same bits in torch and ONNX Runtime, the right share, no pattern."""

import itertools

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from bnexport.exporting.dynamo import quiet
from bnexport.training import dropout

SEEDS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]


def mask(seed, size, layer=0, p=0.5):
    return dropout.keep_mask(torch.tensor(seed), size, layer, p)


class Masks(nn.Module):
    def forward(self, seed, x):
        return tuple(dropout.keep_mask(seed, x.shape, layer, p) for layer, p in enumerate((0.5, 0.1, 0.999)))


def test_onnxruntime_draws_the_same_bits(tmp_path):
    with quiet():
        inputs, sizes = (torch.tensor(1), torch.zeros(3, 5, 7)), (None, {0: torch.export.Dim.DYNAMIC})
        program = torch.export.export(Masks(), inputs, dynamic_shapes=sizes)
        options = {"custom_translation_table": dropout.TRANSLATIONS, "input_names": ["seed", "x"], "verbose": False}
        torch.onnx.export(program, **options).save(tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    for seed, size in itertools.product(SEEDS, (2, 70)):
        got = session.run(None, {"seed": np.array(seed), "x": np.zeros((size, 5, 7), np.float32)})
        for one, two in zip(got, Masks()(torch.tensor(seed), torch.zeros(size, 5, 7))):
            assert np.array_equal(one, two.numpy()), seed


def test_a_seed_and_a_layer_mean_one_mask():
    assert torch.equal(mask(5, [1000]), mask(5, [1000]))
    assert torch.equal(mask(5, [10, 100]).flatten(), mask(5, [1000])), "the position counts, not the shape"
    for other in (mask(6, [1000]), mask(5 + 2**32, [1000]), mask(5, [1000], layer=1)):
        assert 400 < int((other != mask(5, [1000])).sum()) < 600


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_elements_is_p(p):
    """Within five standard deviations, over seeds and layers as well as over positions."""
    n = 20_000
    bound = 5 * (p * (1 - p) / n) ** 0.5
    for seed in SEEDS:
        assert abs(1 - mask(seed, [n], p=p).double().mean().item() - p) < bound
    along_seeds = torch.stack([mask(seed, [8], p=p) for seed in range(n // 8)]).double()
    assert abs(1 - along_seeds.mean().item() - p) < bound
    along_layers = torch.stack([mask(3, [8], layer, p) for layer in range(n // 8)]).double()
    assert abs(1 - along_layers.mean().item() - p) < bound


def test_masks_have_no_pattern():
    """Correlation between neighbours, rows, seeds and layers: below five standard deviations of chance."""
    n = 2**16
    first = mask(11, [n]).double() * 2 - 1
    others = {
        **{f"shift {shift}": first.roll(shift) for shift in (1, 2, 3, 8, 64, 256, 4096)},
        **{f"seed +{step}": mask(11 + step, [n]).double() * 2 - 1 for step in (1, 2, 1 << 16, 1 << 32, 1 << 62)},
        **{f"layer {layer}": mask(11, [n], layer).double() * 2 - 1 for layer in (1, 2, 100)},
    }
    for what, other in others.items():
        assert abs((first * other).mean().item()) < 5 / n**0.5, what
    counts = torch.bincount((mask(11, [n]).view(-1, 8) * (2 ** torch.arange(8))).sum(1), minlength=256).double()
    expected = n / 8 / 256
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Dropout(0.4), (50, 40)),
        (nn.Dropout1d(0.4), (50, 40, 3)),
        (nn.Dropout2d(0.4), (50, 40, 2, 2)),
        (nn.Dropout3d(0.4), (50, 40, 1, 2, 2)),
        (nn.Dropout1d(0.4), (2000, 3)),
    ],
    ids=["elements", "1d", "2d", "3d", "1d-unbatched"],
)
def test_layers_drop_and_scale_as_torch(layer, shape):
    """2000 numbers are drawn, one for each element or channel."""
    mode = dropout.SeededDropout(torch.tensor(7))
    with mode:
        y, again = (layer(torch.ones(shape)) for _ in range(2))
    assert mode.layers == 2 and not torch.equal(y, again)
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.6).item()}
    drawn = y.reshape(2000, -1)
    assert torch.equal(drawn.amin(1), drawn.amax(1))
    for found, p in ((drawn == 0, 0.4), (drawn[:-1] != drawn[1:], 0.48)):
        assert abs(found.double().mean().item() - p) < 5 * (p * (1 - p) / 2000) ** 0.5


@pytest.mark.parametrize("layer", [nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3)], ids=["alpha", "feature"])
def test_alpha_dropout_keeps_mean_and_variance(layer):
    x = torch.randn(300, 300, 2, generator=torch.Generator().manual_seed(0))
    with dropout.SeededDropout(torch.tensor(7)):
        y = layer(x)
    assert abs(y.mean().item()) < 0.02 and abs(y.var().item() - 1) < 0.03
    constant = torch.full((300, 300, 2), 0.25)
    with dropout.SeededDropout(torch.tensor(7)):
        values = layer(constant).unique()
    torch.testing.assert_close(values, layer(constant).unique(), rtol=1e-6, atol=1e-6)


def test_what_does_not_drop_stays():
    x = torch.randn(4, 4)
    mode = dropout.SeededDropout(torch.tensor(7))
    with mode:
        assert nn.Dropout(0.5).eval()(x) is x
        assert torch.equal(nn.Dropout(0.0)(x), x)
        assert torch.equal(nn.functional.dropout(x, 1.0), torch.zeros(4, 4))
        assert mode.layers == 0
        z = x.clone()
        assert nn.functional.dropout(z, 0.5, inplace=True) is z and not torch.equal(z, x)
        assert torch.equal(torch.dropout(x, 0.5, train=False), x)
