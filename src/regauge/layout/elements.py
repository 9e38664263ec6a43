"""Element types as numpy sees them: float8_e4m3fn codes as one byte of `ml_dtypes.float8_e4m3fn`, and so on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

NUMPY_DTYPES: Mapping[str, Any] = MappingProxyType(
    {
        "float32": np.float32,
        "bfloat16": ml_dtypes.bfloat16,
        "float16": np.float16,
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
        "float8_e5m2": ml_dtypes.float8_e5m2,
        "int8": np.int8,
        "float4_e2m1fn_x2": np.uint8,
        "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    }
)
"""By the names of `layout.dtypes`: elements and scales."""
