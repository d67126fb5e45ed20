"""The definitions of MMCV's operators against MMCV's own kernels."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.frameworks import mmcv_kernels, stand_ins

NUMBERS = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=NUMBERS)


def boxes(count: int, extent: float) -> torch.Tensor:
    corners, _ = (torch.rand(count, 2, 2, generator=NUMBERS) * extent).sort(1)
    return corners.reshape(count, 4)


def defined(operator: Any, *inputs: torch.Tensor | None, **attributes: Any) -> np.ndarray:
    (result,) = operator._run(None, *(None if it is None else it.double().numpy() for it in inputs), **attributes)
    return result


def difference(found: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.abs(found.numpy() - expected).max() / max(np.abs(expected).max(), 1e-30))


def deformable() -> float:
    from mmcv.ops import deform_conv2d, modulated_deform_conv2d

    from bnexport.graph.mmcv_reference import MMCVModulatedDeformConv2d as Operator

    worst = 0.0
    choices = ((1, 2), (0, 2), (1, 2), (1, 2), (1, 2), ((3, 3), (1, 1), (2, 3)), ((9, 9), (8, 13)))
    for stride, padding, dilation, groups, parts, kernel, sides in itertools.product(*choices):
        out = [(side + 2 * padding - dilation * (k - 1) - 1) // stride + 1 for side, k in zip(sides, kernel)]
        positions = parts * kernel[0] * kernel[1]
        x, w, b = normal(2, 4, *sides), normal(6, 4 // groups, *kernel), normal(6)
        offset, mask = 2 * normal(2, 2 * positions, *out), torch.rand(2, positions, *out, generator=NUMBERS)
        how = (stride, padding, dilation, groups, parts)
        pairs = {"stride": [stride] * 2, "padding": [padding] * 2, "dilation": [dilation] * 2}
        names: dict[str, Any] = {**pairs, "groups": groups, "deform_groups": parts}
        modulated = modulated_deform_conv2d(x, offset, mask, w, b, *how)
        worst = max(worst, difference(modulated, defined(Operator, x, offset, mask, w, b, **names)))
        plain = deform_conv2d(x, offset, w, *how)
        worst = max(worst, difference(plain, defined(Operator, x, offset, None, w, **names)))
    return worst


def roi_align() -> float:
    from mmcv.ops import roi_align as operator

    from bnexport.graph.mmcv_reference import MMCVRoiAlign

    worst = 0.0
    for aligned, ratio, scale, size in itertools.product((1, 0), (0, 1, 2, 3), (1.0, 0.25), ((1, 1), (3, 2), (7, 7))):
        x = normal(2, 3, 11, 14)
        rois = torch.cat([torch.randint(0, 2, (8, 1), generator=NUMBERS).float(), boxes(8, 16 / scale) - 2], 1)
        found = operator(x, rois, size, scale, ratio, "avg", bool(aligned))
        shape = {"output_height": size[0], "output_width": size[1]}
        expected = defined(
            MMCVRoiAlign, x, rois, mode="avg", spatial_scale=scale, sampling_ratio=ratio, aligned=aligned, **shape
        )
        worst = max(worst, difference(found, expected))
    return worst


def others() -> int:
    """How many results of nms and CornerPool differ at all."""
    from mmcv.ops import CornerPool, nms

    from bnexport.graph.mmcv_reference import MMCVCornerPool, NonMaxSuppression

    different = 0
    for offset, threshold in itertools.product((0, 1), (0.1, 0.3, 0.5, 0.7)):
        given, scores = boxes(60, 40), torch.rand(60, generator=NUMBERS)
        _, kept = nms(given, scores, threshold, offset)
        expected = defined(NonMaxSuppression, given, scores, iou_threshold=threshold, offset=offset)
        different += not np.array_equal(kept.numpy(), expected)
    for mode, name in enumerate(("top", "bottom", "left", "right")):
        x = normal(2, 3, 5, 7)
        different += not np.array_equal(CornerPool(name)(x).numpy(), defined(MMCVCornerPool, x, mode=mode))
    return different


def definitions_are_those_of_the_kernels(folder: Path) -> None:
    stand_ins.torchvision()
    mmcv_kernels.install()
    worst = deformable(), roi_align()
    assert max(worst) < 4e-6, worst
    assert others() == 0
