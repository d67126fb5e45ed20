"""Float types supported for parameters."""

from __future__ import annotations

import ml_dtypes
import numpy as np

# Weights are rounded to these types; anything else is not a parameter type.
FLOAT_TYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
