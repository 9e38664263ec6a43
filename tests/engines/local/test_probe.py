"""The local engine's real pool, kernels and all, is where its layout says."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from regauge.engines.local.probe import LocalCache
from regauge.engines.probe import probe
from regauge.errors import ConfigError, EngineError
from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import Array
from regauge.layout.validate import validate

pytestmark = pytest.mark.model

MODEL = attention_model("m", 3, Array(2, 16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "form",
    ["bf16,page=4", "fp32,page=3,hnd,page-first", "fp16,page=5,kt", "fp8,page=4,fused,scale=tensor", "int8,page=4,scale=head",
     "fp8,page=4,hnd,scale=token_head", "fp8_e5m2,page=16,fused,page-first"],
)  # fmt: skip
def test_it_is_verified(form: str, dtype: str) -> None:
    with LocalCache(from_short(form, MODEL, pages=5), dtype) as cache:
        verdict = probe(cache)
    assert verdict.verified, verdict.first
    assert verdict.strays == ()


@pytest.mark.parametrize(
    "changes", [{"pow2": True}, {"floor": 1e-2}, {"rule": "divide"}, {"dtype": "float8_e8m0fnu", "pow2": True}]
)
def test_k_and_v_of_one_shape_keep_scales_of_their_own(changes: dict[str, object]) -> None:
    layout = from_short("fp8,page=4,scale=token_head", MODEL, pages=5)
    k, v = layout.groups[0].components
    assert k.scale is not None
    k = msgspec.structs.replace(k, scale=msgspec.structs.replace(k.scale, **changes))
    group = msgspec.structs.replace(layout.groups[0], components=[k, v])
    with LocalCache(validate(msgspec.structs.replace(layout, groups=[group]))) as cache:
        verdict = probe(cache)
    assert verdict.verified, verdict.first


def test_a_wrong_declaration_is_caught() -> None:
    with LocalCache(from_short("fp8,page=4,hnd", MODEL, pages=5)) as cache:
        verdict = probe(cache, from_short("fp8,page=4", MODEL, pages=5))
    assert verdict.first is not None
    assert verdict.first.looks_like == ("axes token and head swapped: order 'layer page head token dim'",)


def test_what_the_engine_cannot_keep_is_refused() -> None:
    layout = from_short("bf16,page=4", MODEL, pages=5)
    group = msgspec.structs.replace(layout.groups[0], layers="0-1")
    with pytest.raises(ConfigError, match="all layers and heads"):
        LocalCache(msgspec.structs.replace(layout, groups=[group]))
    other = from_short("bf16,page=4", attention_model("m", 3, Array(2, 8)), pages=5)
    with LocalCache(layout) as cache:
        with pytest.raises(EngineError, match="2 heads of 16"):
            probe(cache, other)
        with pytest.raises(EngineError, match="keeps no window"):
            cache.write("window", 0, np.arange(1), {})
