"""A dimension is dynamic in the file only if the file is right at other sizes of it."""

import contextlib
import itertools
import re

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bnexport
from bnexport.errors import UnsupportedModelError, VerificationError
from bnexport.exporting import dimensions, onnx_target
from tests.exporting.traces import is_tracer_note

DYNAMIC = ["batch", 3, "height", "width"]


def conv_and_norm():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())


class Halves(nn.Module):
    """As code outside Python would, it takes the number out of a size; an exporter cannot follow."""

    def __init__(self):
        super().__init__()
        self.body = conv_and_norm()

    def forward(self, x):
        height, width = x.shape[-2:]
        return F.interpolate(
            self.body(x), ((height * 0.5).__int__(), (width * 0.5).__int__()), mode="bilinear", align_corners=False
        )


def export(model, tmp_path, **options):
    torch.manual_seed(0)
    options = {"exporter": "torchscript", "overwrite": True, **options}
    return bnexport.export(model.eval(), torch.randn(2, 3, 6, 6), tmp_path / "m.onnx", **options)


def notes(result):
    """The notes on dimensions; a trace has others on the lines of the model."""
    return tuple(note for note in result.notes if not is_tracer_note(note))


def declared(result):
    shape = onnxruntime.InferenceSession(result.path).get_inputs()[0].shape
    return ["width" if index == 3 and size == "height" else size for index, size in enumerate(shape)]


def is_right(result, model, shape):
    x = torch.randn(shape)
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        expected = model.eval()(x)
        session = onnxruntime.InferenceSession(result.path)
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        return got.shape == tuple(expected.shape) and np.allclose(got, expected, rtol=1e-4, atol=1e-5)
    return True


class Filters(nn.Module):
    """As DMNet makes filters of each image: the number of groups, an attribute in ONNX, is a multiple of the batch."""

    def __init__(self):
        super().__init__()
        self.filters = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        batch, channels, height, width = x.shape
        filters = self.filters(F.adaptive_avg_pool2d(x, 3)).view(batch * channels, 1, 3, 3)
        y = F.conv2d(x.view(1, batch * channels, height, width), filters, padding=1, groups=batch * channels)
        return y.view(batch, channels, height, width)


@pytest.mark.parametrize(("exporter", "shape"), [("dynamo", [2, 3, "height", "width"]), ("torchscript", [2, 3, 6, 6])])
def test_a_batch_that_an_attribute_depends_on_is_fixed(exporter, shape, tmp_path):
    model = Filters()
    result = export(model, tmp_path, exporter=exporter)
    assert result.verification.passed
    assert declared(result) == shape
    assert result.notes[0].startswith("input 'x': dimension 0 (batch) stays 2: the exporter cannot write it for other")
    assert is_right(result, model, (2, 3, 11, 7) if "height" in shape else (2, 3, 6, 6))


@pytest.mark.parametrize("mode", ["deploy", "custom_op"])
def test_training_graphs_too(mode, tmp_path):
    model = nn.Sequential(nn.BatchNorm2d(3), Halves())
    model.train()
    x = torch.randn(2, 3, 6, 6)
    result = bnexport.export(model, x, tmp_path / "m.onnx", mode=mode, exporter="torchscript")
    assert result.verification.passed
    assert declared(result) == ["batch", 3, 6, 6]
    assert "stays 6: the exported model differs from torch at 131" in notes(result)[0]


def test_the_verdict_names_the_sizes(tmp_path):
    """Far larger in each direction, odd, smaller, one row and many rows."""
    result = export(conv_and_norm(), tmp_path)
    assert result.verification.sizes == tuple(
        ((*shape,),) for shape in [(2, 3, 6, 6), (1, 3, 6, 6), (2, 3, 131, 6), (3, 3, 6, 131), (9, 3, 3, 3)]
    )
    assert "at 5 sizes: 2x3x6x6, 1x3x6x6, 2x3x131x6, 3x3x6x131, 9x3x3x3" in result.verification.summary()
    static = export(conv_and_norm(), tmp_path, dynamic=False)
    assert static.verification.sizes == (((2, 3, 6, 6),),)
    assert "sizes" not in static.verification.summary()


def test_one_dimension_stays_static(tmp_path, monkeypatch):
    """The other ones of the same input, and those of other inputs, stay dynamic."""

    class Two(nn.Module):
        def forward(self, left, right):
            height = torch.arange(float((left.shape[2] * 1.0).__int__()))
            return left * height[:, None], right * 2.0

    args = (torch.randn(2, 3, 6, 5), torch.randn(2, 3, 4))
    result = bnexport.export(Two(), args, tmp_path / "m.onnx", exporter="torchscript")
    left, right = (value.shape for value in onnxruntime.InferenceSession(result.path).get_inputs())
    assert (left, right) == (["left_batch", 3, 6, "left_width"], ["right_batch", 3, "right_length"])
    assert notes(result) == ("input 'left': dimension 2 (left_height) stays 6: the exported model does not run at 131",)


class Branch(nn.Module):
    """Code that asks for a size, of which a trace keeps one branch."""

    def __init__(self, condition):
        super().__init__()
        self.body = conv_and_norm()
        self.condition = condition

    def forward(self, x):
        y = self.body(x)
        return y * 2 if self.condition(*x.shape) else y


BRANCHES = {
    "large batch": (lambda n, c, h, w: n > 11, ["stays 4", "at 18 (batch <= 11 at exporting/test_other_sizes.py:"]),
    "multiple of 7": (lambda n, c, h, w: n % 7 == 0, ["stays 4", "at 7"]),
    "large height": (lambda n, c, h, w: h > 13, ["stays 6", "at 131 (height <= 13 at exporting/test_other_sizes.py:"]),
}


@pytest.mark.parametrize("name", [pytest.param("large batch", marks=pytest.mark.slow), "multiple of 7", "large height"])
def test_branches_that_no_ordinary_size_takes(name, tmp_path):
    """torch.export knows the conditions; the graph is compared where they do not hold."""
    condition, words = BRANCHES[name]
    model = Branch(condition).eval()
    result = bnexport.export(model, torch.randn(4, 3, 6, 6), tmp_path / "m.onnx")
    assert result.verification.passed
    (note,) = result.notes
    assert all(word in note for word in [*words, "the exported model differs from torch"])
    assert isinstance(declared(result)[0], int) is name.endswith(("batch", "7"))


class Limited(nn.Module):
    """A batch norm and a function of the result and of the input's batch and height."""

    def __init__(self, function):
        super().__init__()
        self.norm, self.function = nn.BatchNorm2d(3), function

    def forward(self, x):
        return self.function(self.norm(x), x.shape[0], x.shape[2])


def refuse_above_nine(y, batch, height):
    if batch > 9:
        raise ValueError("at most nine")
    return y


# A function; the dimensions that are static; the note.
LIMITS = {
    "a branch above": (lambda y, n, h: y if h < 900 else y * 2, [2],
        r"differs from torch at 900 \(height < 900 at exp"),
    "a branch below": (lambda y, n, h: y if h > 2 else y * 2, [2], r"differs from torch at 2 \(height > 2 at exp"),
    "a branch on the batch": (lambda y, n, h: y if n < 300 else y * 2, [0],
        r"at 300 \(batch < 300 at exporting/test_oth"),
    "too large to try": (lambda y, n, h: y if n < 10**7 else y * 2, [0],
        r"too large to try \(at exporting/test_other_si"),
    "no guard at all": (lambda y, n, h: y[:, :, 2:][:, :, : min(h, 30)], [2], r"differs from torch at 131$"),
    "an error": (refuse_above_nine, [],
        r"has to be at most 9, the model limits it \(exporting/test_other_sizes.py:\d+ in ref"),
    "an equal branch": (lambda y, n, h: y if h < 900 else y + 0.0, [], None),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("an equal branch", "a branch below") else ())
        for name in LIMITS
    ],
)
def test_ranges_of_the_program_bind_the_file(name, tmp_path):
    """However far from the example they end; a limit beyond which the model itself fails is noted only."""
    function, static, words = LIMITS[name]
    result = bnexport.export(Limited(function).eval(), torch.randn(2, 3, 6, 6), tmp_path / "m.onnx", exporter="dynamo")
    assert result.verification.passed
    assert [index for index, size in enumerate(declared(result)) if isinstance(size, int) and index != 1] == static
    assert not result.notes if words is None else re.search(words, "".join(result.notes)), result.notes


def test_a_named_dimension_of_a_second_input_is_refused(tmp_path):
    class Two(nn.Module):
        def forward(self, left, right):
            return left * 2, right if right.shape[1] < 9 else right * 2

    with pytest.raises(
        UnsupportedModelError, match=r"input 'right': dimension 1 \(n\) stays 4: .*leave dimension 1 of 'right'"
    ):
        bnexport.export(
            Two(), (torch.randn(2, 3), torch.randn(2, 4)), tmp_path / "m.onnx", dynamic={"right": {1: "n"}, "left": [0]}
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["onnx", pytest.param("pt2", marks=pytest.mark.slow)])
def test_a_batch_of_one_that_takes_another_branch(format, tmp_path):
    """It is doubled for torch.export, which then sees an even batch."""
    model, x = Branch(lambda n, c, h, w: n % 2 == 0).eval(), torch.randn(1, 3, 6, 6)
    result = bnexport.export(model, x, tmp_path / "m", format=format)
    assert result.verification.passed
    (note,) = result.notes
    assert note.startswith("input 'x': dimension 0 (batch) stays 1, the model fixes it")


def test_equal_values_hide_nothing(tmp_path, monkeypatch):
    """On zeros a wrong weight makes no difference: random numbers are compared as well."""

    def wrong(model, *arguments, finish=onnx_target.finish):
        finish(model, *arguments)
        for value in model.graph.initializers.values():
            value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1.05), name=value.name)

    monkeypatch.setattr(onnx_target, "finish", wrong)
    model = nn.Conv2d(3, 4, 1, bias=False).eval()
    with pytest.raises(VerificationError, match=r"nothing was written: output 'output' in .*: differs"):
        bnexport.export(model, torch.zeros(1, 3, 4, 4), tmp_path / "m.onnx", exporter="torchscript", dynamic=False)


class More(nn.Module):
    """Takes further values after its image, which a window makes smaller."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x, *others, scale=1.0):
        return sum(others, self.conv(x) * scale)


@pytest.mark.parametrize("count", [0, 1])
def test_pt2_of_a_forward_with_further_inputs(count, tmp_path):
    args = (torch.randn(2, 3, 8, 8), *(torch.randn(2, 4, 6, 6) for _ in range(count)))
    result = bnexport.export(More().eval(), args, tmp_path / "m.pt2", format="pt2")
    assert result.verification.passed
    assert not result.notes


@pytest.mark.slow
def test_a_trace_for_one_size_is_refused(tmp_path):
    class Unscriptable(Halves):
        def forward(self, x):
            return super().forward(x) * max({2 * value for value in (0, 1)})

    arguments = (Unscriptable().eval(), torch.randn(2, 3, 6, 6), tmp_path / "m.pt")
    with pytest.raises(VerificationError, match=r"differs from torch at \d+.*dynamic=False"):
        bnexport.export(*arguments, format="torchscript")
    with pytest.warns(UserWarning, match="traced instead"):
        assert bnexport.export(*arguments, format="torchscript", dynamic=False).verification.passed


def test_groups_of_dimensions():
    image, mask, tokens = torch.zeros(2, 3, 8, 6), torch.zeros(2, 1, 8, 6), torch.zeros(2, 5)
    groups = dimensions.groups((image, mask, tokens), [{0, 2, 3}, {0, 2, 3}, {0}])
    assert [(group.place, group.size, group.axes) for group in groups] == [
        (0, 2, ((0, 0), (1, 0), (2, 0))),
        (-2, 8, ((0, 2), (1, 2))),
        (-1, 6, ((0, 3), (1, 3))),
    ]
    for changes in itertools.chain(*dimensions.plan((image, mask, tokens), groups)):
        shapes = dimensions.shapes((image, mask, tokens), changes)
        assert shapes[0][2:] == shapes[1][2:]
        assert len({shape[0] for shape in shapes}) == 1


@pytest.mark.parametrize("shape", [(1, 3, 224, 224), (8, 3, 512, 1024), (2, 16, 1000), (1, 1, 64, 64, 64)], ids=str)
def test_other_sizes_cost_little(shape):
    x = torch.zeros(shape)
    groups = dimensions.groups((x,), [{0, *range(2, x.dim())}])
    wanted, larger = dimensions.plan((x,), groups)
    assert len(wanted) == 4 - (shape[0] == 1) and len(larger) == 1
    for changes in [*wanted, *larger]:
        assert np.prod(dimensions.shapes((x,), changes)[0], dtype=np.int64) <= max(2 * x.numel(), 1 << 16)


def test_inputs_of_other_sizes():
    ids, image, zeros = torch.arange(4).reshape(2, 2), torch.randn(2, 3), torch.zeros(2, 3)
    groups = dimensions.groups((ids, image, zeros), [{0, 1}, {0, 1}, {0, 1}])
    changes = {group: 2 * group.size + 1 for group in groups}
    got = dimensions.resized((ids, image, zeros), changes)
    assert [tuple(tensor.shape) for tensor in got] == [(5, 5), (5, 7), (5, 7)]
    assert torch.equal(got[0][:2, :2], ids) and set(got[0].flatten().tolist()) <= {0, 1, 2, 3}
    assert set(got[1].flatten().tolist()) <= set(image.flatten().tolist())
    assert len(got[2].unique()) > 30 and got[2].min() >= 0 and got[2].max() <= 1
