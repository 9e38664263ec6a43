"""States of every kind cross between the two engines' pools, element for element, and back without a changed byte."""

from __future__ import annotations

import numpy as np
import pytest

from regauge.layout.engines import Flags, engine_layout
from regauge.layout.spec import Layout, Model
from regauge.move import kernels
from regauge.plan import check, compile, instantiate
from regauge.plan.reference import transfer
from strategies import Pool, assert_same
from tensors import DENSE, KIMI, QWEN, SPARSE, WINDOW

CASES = [
    (DENSE, {"page_size": 4}, {"page_size": 16}),
    (DENSE, {"pool": "page_first", "page_size": 4}, {"pool": "BLNHC", "page_size": 16}),
    (SPARSE, {"page_size": 64}, {}),
    (SPARSE, {"page_size": 64, "kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_ds_mla", "page_size": 32}),
    (WINDOW, {"pool": "hnd", "page_size": 4}, {"pool": "BLHNC"}),
    (QWEN, {"page_size": 4}, {"pool": "LBNHC", "ssm_dtype": "float32"}),
    (QWEN, {"page_size": 4}, {"pool": "BLHNC", "ssm_dtype": "float32"}),
    (KIMI, {"page_size": 4}, {}),
]


def cross(a: Layout, b: Layout, src: Pool, dst: Pool, seed: int) -> None:
    """Carry 20 tokens, or one request, between every pair of groups; compare with the reference."""
    plan, rng = compile(a, b), np.random.default_rng(seed)
    assert check(a, b).path in ("DIRECT", "REMAP")
    for pair in plan.pairs:
        groups = (a.groups[pair[0]], b.groups[pair[1]])
        tokens = (0, 1) if groups[0].kind == "recurrent" else (0, 20)
        p, d = (rng.permutation(g.pages)[: -(-tokens[1] // g.page_size)] for g in groups)
        want = dst.copy()
        transfer(a, b, src.memory, want.memory, src.offsets(p), want.offsets(d), tokens, pair=pair)
        kernels.run(instantiate(plan, src.side(p), dst.side(d), tokens, pair=pair), backend="numpy")
        assert_same(dst, want)
    assert {(g.kind, x) for i, _ in plan.pairs for g in (a.groups[i],) for x in g.layer_ids} == {
        (s.kind, x) for s in a.model.states for x in s.layer_ids
    }


@pytest.mark.parametrize(("model", "one", "other"), CASES)
@pytest.mark.parametrize("forth", [True, False])
def test_engines_carry_to_each_other(
    model: Model, one: dict[str, object], other: dict[str, object], forth: bool
) -> None:
    counts = {"model_dtype": "bfloat16", "pages": 6, "requests": 6}
    sides = (
        engine_layout("sglang", model, Flags(**(counts | one))),  # type: ignore[arg-type]
        engine_layout("vllm", model, Flags(**(counts | other))),  # type: ignore[arg-type]
    )
    a, b = sides if forth else sides[::-1]
    src, dst = (Pool.of(layout, np.random.default_rng(n)) for n, layout in enumerate((a, b)))
    cross(a, b, src, dst, 1)
