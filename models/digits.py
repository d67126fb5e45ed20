"""scikit-learn's handwritten digits: 1,797 real 8 x 8 images that come inside the package."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images (n, 1, 8, 8) float32 of mean 0 and deviation 1, labels (n,) int64."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_digits(test_share: float = 0.2, seed: int = 0) -> Digits:
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    bunch = load()
    images = bunch.images[:, None].astype(np.float32)
    images = (images - images.mean()) / images.std()
    train_x, test_x, train_y, test_y = train_test_split(
        images, bunch.target.astype(np.int64), test_size=test_share, random_state=seed, stratify=bunch.target
    )
    return Digits(train_x, train_y, test_x, test_y)
