"""A dimension is dynamic in the file only if the file is right at other sizes of it; pooling, resampling and norms of the batch
are right at every size.

Resampling by a factor gives the sizes of torch, which computes them in float64: 100 * 2.3 is 230 in float32 only.
"""

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
from bnexport.exporting import dimensions, exact_sizes
from bnexport.exporting.other_sizes import Fault, without_faults
from tests.exporting.files import assert_right, declared, is_tracer_note, operators, output
from tests.exporting.size_corpus import Net, past_a_trace
from tests.support.modules import compose


def export(model, tmp_path, **options):
    torch.manual_seed(0)
    options = {"exporter": "torchscript", "overwrite": True, **options}
    return bnexport.export(model.eval(), torch.randn(2, 3, 6, 6), tmp_path / "m.onnx", **options)


def notes(result):
    return tuple(note for note in result.notes if not is_tracer_note(note))


def filters_of_the_image(self, x):
    """As DMNet makes filters of each image: the number of groups, an attribute in ONNX, is a multiple of the batch."""
    batch, channels, height, width = x.shape
    filters = self.filters(F.adaptive_avg_pool2d(x, 3)).view(batch * channels, 1, 3, 3)
    y = F.conv2d(x.view(1, batch * channels, height, width), filters, padding=1, groups=batch * channels)
    return y.view(batch, channels, height, width)


@pytest.mark.parametrize(("exporter", "static"), [("dynamo", [0, 1]), ("torchscript", [0, 1, 2, 3])])
def test_a_batch_that_an_attribute_depends_on_is_fixed(exporter, static, tmp_path):
    model = compose(filters_of_the_image, filters=nn.Conv2d(3, 3, 1))
    result = export(model, tmp_path, exporter=exporter)
    assert result.verification.passed
    assert [index for index, size in enumerate(declared(result.path)) if isinstance(size, int)] == static
    assert result.notes[0].startswith("input 'x': dimension 0 (batch) stays 2: the exporter cannot write it for other")
    assert_right(result.path, model, (2, 3, 6, 6) if 2 in static else (2, 3, 11, 7))


@pytest.mark.parametrize("mode", ["deploy", "custom_op"])
def test_training_graphs_too(mode, tmp_path):
    model = nn.Sequential(nn.BatchNorm2d(3), Net(past_a_trace)).train()
    x = torch.randn(2, 3, 6, 6)
    result = bnexport.export(model, x, tmp_path / "m.onnx", mode=mode, exporter="torchscript")
    assert result.verification.passed
    assert declared(result.path) == ["batch", 3, 6, 6]
    assert "stays 6: the exported model differs from torch at 131" in notes(result)[0]


def test_the_verdict_names_the_sizes(tmp_path):
    """Far larger in each direction, odd, smaller, one row and many rows."""
    model = Net(nn.Identity())
    result = export(model, tmp_path)
    sizes = [(2, 3, 6, 6), (1, 3, 6, 6), (2, 3, 131, 6), (3, 3, 6, 131), (9, 3, 3, 3)]
    assert result.verification.sizes == tuple((size,) for size in sizes)
    assert "at 5 sizes: 2x3x6x6, 1x3x6x6, 2x3x131x6, 3x3x6x131, 9x3x3x3" in result.verification.summary()
    static = export(model, tmp_path, dynamic=False)
    assert static.verification.sizes == (((2, 3, 6, 6),),)
    assert "sizes" not in static.verification.summary()


def test_one_dimension_stays_static(tmp_path):
    """The other ones of the same input, and those of other inputs, stay dynamic."""

    def forward(self, left, right):
        height = torch.arange(float((left.shape[2] * 1.0).__int__()))
        return left * height[:, None], right * 2.0

    args = (torch.randn(2, 3, 6, 5), torch.randn(2, 3, 4))
    result = bnexport.export(compose(forward), args, tmp_path / "m.onnx", exporter="torchscript")
    left, right = (value.shape for value in onnxruntime.InferenceSession(result.path).get_inputs())
    assert (left, right) == (["left_batch", 3, 6, "left_width"], ["right_batch", 3, "right_length"])
    assert notes(result) == ("input 'left': dimension 2 (left_height) stays 6: the exported model does not run at 131",)


def refuse_above_nine(y):
    if y.shape[0] > 9:
        raise ValueError("at most nine")
    return y


# A function with a branch on a size, which torch.export knows and of which a graph keeps one; the dimensions that are
# static; the note.
LIMITS = {
    "large height": (lambda y: y * 2 if y.shape[2] > 13 else y, [2], r"stays 6.* at 131 \(height <= 13 at exporting/test_oth"),
    "multiple of 7": (lambda y: y * 2 if y.shape[0] % 7 == 0 else y, [0], r"stays 2: the exported model differs .* at 7\b"),
    "a branch above": (lambda y: y if y.shape[2] < 900 else y * 2, [2], r"differs from torch at 900 \(height < 900 at exp"),
    "a branch below": (lambda y: y if y.shape[2] > 2 else y * 2, [2], r"differs from torch at 2 \(height > 2 at exp"),
    "a branch on the batch": (lambda y: y if y.shape[0] < 300 else y * 2, [0], r"at 300 \(batch < 300 at exporting/test_oth"),
    "too large to try": (lambda y: y if y.shape[0] < 10**7 else y * 2, [0], r"too large to try \(at exporting/test_other_si"),
    "no guard at all": (lambda y: y[:, :, 2:][:, :, : min(y.shape[2], 30)], [2], r"differs from torch at 131$"),
    "an error": (refuse_above_nine, [],
        r"has to be at most 9, the model limits it \(exporting/test_other_sizes.py:\d+ in ref"),
    "an equal branch": (lambda y: y if y.shape[2] < 900 else y + 0.0, [], None),
}  # fmt: skip
SLOW = ("an equal branch", "a branch below")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LIMITS]
)
def test_ranges_of_the_program_bind_the_file(name, tmp_path):
    """However far from the example they end; a limit beyond which the model itself fails is noted only."""
    function, static, words = LIMITS[name]
    result = export(Net(function), tmp_path, exporter="dynamo")
    assert result.verification.passed
    assert [index for index, size in enumerate(declared(result.path)) if isinstance(size, int) and index != 1] == static
    assert not result.notes if words is None else re.search(words, "".join(result.notes)), result.notes


def test_a_named_dimension_of_a_second_input_is_refused(tmp_path):
    model = compose(lambda self, left, right: (left * 2, right if right.shape[1] < 9 else right * 2))
    args, dynamic = (torch.randn(2, 3), torch.randn(2, 4)), {"right": {1: "n"}, "left": [0]}
    words = r"input 'right': dimension 1 \(n\) stays 4: .*leave dimension 1 of 'right'"
    with pytest.raises(UnsupportedModelError, match=words):
        bnexport.export(model, args, tmp_path / "m.onnx", dynamic=dynamic)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["onnx", pytest.param("pt2", marks=pytest.mark.slow)])
def test_a_batch_of_one_that_takes_another_branch(format, tmp_path):
    """It is doubled for torch.export, which then sees an even batch."""
    model, x = Net(lambda y: y * 2 if y.shape[0] % 2 == 0 else y).eval(), torch.randn(1, 3, 6, 6)
    result = bnexport.export(model, x, tmp_path / "m", format=format)
    assert result.verification.passed
    (note,) = result.notes
    assert note.startswith("input 'x': dimension 0 (batch) stays 1, the model fixes it")


def test_equal_values_hide_nothing(tmp_path, wrong_weight):
    """On zeros a wrong weight makes no difference: random numbers are compared as well."""
    model = nn.Conv2d(3, 4, 1, bias=False).eval()
    with pytest.raises(VerificationError, match=r"nothing was written: output 'output' in .*: differs"):
        bnexport.export(model, torch.zeros(1, 3, 4, 4), tmp_path / "m.onnx", exporter="torchscript", dynamic=False)


@pytest.mark.parametrize("count", [0, 1])
def test_pt2_of_a_forward_with_further_inputs(count, tmp_path):
    args = (torch.randn(2, 3, 8, 8), *(torch.randn(2, 4, 6, 6) for _ in range(count)))

    def forward(self, x, *others, scale=1.0):
        return sum(others, self.conv(x) * scale)

    result = bnexport.export(compose(forward, conv=nn.Conv2d(3, 4, 3)).eval(), args, tmp_path / "m.pt2", format="pt2")
    assert result.verification.passed
    assert not result.notes


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


# In size_corpus.py is pooling of images. Sizes to compare at: divisible, prime, smaller than the output (values repeat), one.
SIZES = {1: [(6,), (11,), (2,), (1,)], 2: [(6, 8), (11, 7), (2, 13), (1, 1)], 3: [(4, 6, 5), (7, 1, 3)]}
POOLINGS = {
    "average 1d": (1, nn.AdaptiveAvgPool1d(3)),
    "average of rows": (2, nn.AdaptiveAvgPool2d((1, 3))),
    "average 3d": (3, nn.AdaptiveAvgPool3d((2, None, 3))),
    "maximum 1d": (1, nn.AdaptiveMaxPool1d(3)),
    "maximum 3d": (3, nn.AdaptiveMaxPool3d((2, 3, 1))),
}
CASES = [("torchscript", name) for name in POOLINGS] + [
    pytest.param("dynamo", name, marks=[] if name == "average of rows" else pytest.mark.slow) for name in POOLINGS
]


@pytest.mark.parametrize(("exporter", "name"), CASES)
def test_every_size(exporter, name, tmp_path):
    rank, model = POOLINGS[name]
    x = torch.randn(2, 3, *(7, 6, 8)[:rank])
    result = bnexport.export(model, x, tmp_path / "m.onnx", exporter=exporter)
    assert result.verification.passed
    assert not result.notes
    assert_right(result.path, model, *((5, 3, *shape) for shape in SIZES[rank]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_resize_stays_where_it_is_exact(mode, tmp_path):
    """2, 0.5 and 1.7 give the same sizes in float32 and float64."""
    for factor in (2, 0.5, 1.7, 2.3):
        model, options = nn.Upsample(scale_factor=factor, mode=mode), {"exporter": "torchscript", "overwrite": True}
        result = bnexport.export(model, torch.randn(2, 3, 8, 8), tmp_path / "m.onnx", **options)
        assert (operators(result.path) == ["Resize"]) is (factor != 2.3)


def test_a_norm_without_statistics_in_half_precision(tmp_path):
    """As operators that every runtime takes: BatchNormalization would have to train, and fix the batch."""
    model = nn.BatchNorm2d(3, track_running_stats=False).half().eval()
    result = bnexport.export(model, torch.randn(2, 3, 7, 6).half(), tmp_path / "m.onnx", exporter="torchscript")
    assert result.verification.passed
    x = torch.randn(5, 3, 9, 4).half()
    np.testing.assert_allclose(output(result.path, x), model(x).detach(), rtol=0, atol=4e-3)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_types(dtype, tmp_path):
    """float16 values are added in float32, as torch does."""
    model, dtype = nn.AdaptiveAvgPool2d(2), getattr(torch, dtype)
    x = torch.full((1, 1, 64, 66), 100.0).to(dtype)
    result = bnexport.export(model, torch.randn(2, 1, 6, 6).to(dtype), tmp_path / "m.onnx", exporter="torchscript")
    assert result.verification.passed
    np.testing.assert_allclose(output(result.path, x), model(x), rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("model", "exporter", "dynamic", "kind"),
    [
        (nn.AdaptiveAvgPool2d(1), "torchscript", True, "GlobalAveragePool"),
        (nn.AdaptiveAvgPool2d(1), "dynamo", True, "ReduceMean"),
        (nn.AdaptiveMaxPool2d(1), "torchscript", True, "GlobalMaxPool"),
        (nn.AdaptiveAvgPool2d(3), "torchscript", False, "AveragePool"),
    ],
    ids=str,
)
def test_what_stays_one_operator(model, exporter, dynamic, kind, tmp_path):
    """Global pooling, and the window of static sizes."""
    result = bnexport.export(model, torch.randn(2, 3, 6, 6), tmp_path / "m.onnx", exporter=exporter, dynamic=dynamic)
    assert operators(result.path) == [kind]


# At the first three, float32 computes another size for 2.3 or 0.7.
FACTOR_SIZES = [(50, 90), (100, 7), (170, 4), (10, 13), (230, 6)]


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_batch_norm_behind_it_folds(dynamic, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Upsample(scale_factor=2.3, mode="bilinear"), nn.BatchNorm2d(2)).eval()
    for values in (model[2].running_mean, model[2].weight, model[2].bias):
        nn.init.normal_(values)
    result = bnexport.export(
        model, torch.randn(1, 3, 100, 50), tmp_path / "m.onnx", dynamic={"input": {2: "height"}} if dynamic else False
    )
    assert result.verification.passed
    assert result.report.after.batch_norm == 0


def test_a_program_is_right_as_well(tmp_path):
    """Its calls are those of aten's operators."""
    sizes = {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    for mode in "nearest", "bilinear":
        model = nn.Upsample(scale_factor=2.3, mode=mode)
        program = torch.export.export(model, (torch.randn(1, 2, 16, 12),), dynamic_shapes=(sizes,))
        result = bnexport.export(program, torch.randn(1, 2, 16, 12), tmp_path / "m.onnx", overwrite=True)
        assert result.verification.passed
        assert_right(result.path, model, *((1, 2, *size) for size in FACTOR_SIZES), rtol=1e-3, atol=1e-3)


def test_scales_with_a_computed_part_are_not_constant():
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[N,3,4,4] x, float[2] s) => (float[N,3,A,B] y) {
        c = Constant <value_floats = [1.0, 1.0]> () t = Concat <axis = 0> (c, s) y = Resize <mode = "linear"> (x, , t) }"""
    *_, resize = ir.from_onnx_text(text).graph
    assert exact_sizes._scales(resize) is None


def test_a_fault_in_a_dimension_that_was_to_be_static():
    chosen = dimensions.Dimensions.chosen(["x"], (torch.zeros(2, 3, 4),), {"x": [0]})
    with pytest.raises(VerificationError, match="was to be static"):
        without_faults(chosen, [Fault(((0, 2),))])
