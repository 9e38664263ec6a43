"""What a template cuts is what the planner makes: same bytes, same digests, for any layers and any slot."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import Array
from regauge.move import digest
from regauge.plan import Side, check, compile, instantiate
from regauge.plan.digest import Keys
from regauge.plan.template import SLOT, Template
from regauge.plan.wire import REGION, WireFormat
from strategies import EIGHT_BIT, FLOATS, Pool, hybrids, layouts, page_tables, shards

ANY = (*FLOATS, *EIGHT_BIT)
KEYS = Keys(bytes(range(32)))


@settings(max_examples=30, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_some_layers_of_a_template_do_what_boxes_of_these_layers_do(data: st.DataObject, seed: int) -> None:
    """Straight into pages, and over two slots: layers in one half of a hybrid's arrays only, context parallelism, scales."""
    model = data.draw(hybrids())
    a, b = (data.draw(layouts(model, ANY, shard=data.draw(shards(model)))) for _ in range(2))
    assume(not check(a, b).refusals)
    plan = compile(a, b)
    wire = WireFormat(plan)
    rng = np.random.default_rng(seed)
    src, direct = Pool.of(a, rng), Pool.of(b, rng)
    for pair in plan.pairs:
        groups = a.groups[pair[0]], b.groups[pair[1]]
        most = 1 if groups[0].kind == "recurrent" else min(g.pages * g.page_size for g in groups)
        tokens = data.draw(st.integers(0, most - 1)), most
        p, d = (data.draw(page_tables(g, most)) for g in groups)
        layers = plan.layers_of(pair)
        first = data.draw(st.integers(0, len(layers) - 1))
        end = data.draw(st.integers(first + 1, len(layers)))

        want = direct.copy()
        plain = instantiate(plan, src.side(p), want.side(d), tokens, pair=pair, layers=layers[first:end], keys=KEYS)
        sums = digest.run(plain)
        got = direct.copy()
        cut = Template(plan, src.side(p), got.side(d), tokens, pair=pair, keys=KEYS).of((first, end))
        assert digest.run(cut) == sums
        assert np.array_equal(got.memory, want.memory)

        count = tokens[1] - tokens[0]
        size = wire.layer_bytes(pair, count)
        gather, scatter = wire.halves(pair, count)
        anywhere = Side(np.zeros(1, np.int64), {REGION: SLOT}, tokens[0])
        halves = (
            Template(gather, src.side(p), anywhere, tokens, pair=(0, 0), keys=KEYS),
            Template(scatter, anywhere, direct.side(d), tokens, pair=(0, 0), keys=KEYS),
        )
        for _ in range(2):  # another slot each time
            slot = np.zeros(size * (end - first) + 64, np.uint8)
            at = slot.ctypes.data - first * size
            sent = digest.run(halves[0].of((first, end), at))
            arrived = digest.run(halves[1].of((first, end), at))
            assert sent.dst == arrived.src
            assert arrived.dst == sums.dst
            assert not slot[size * (end - first) :].any()
        direct.memory[:] = want.memory


def test_layers_that_lack_an_array_are_cut_alike() -> None:
    """K has a layer that V has not: boxes of one layer are not as many as those of the next."""
    model = attention_model("m", 3, Array(2, 8))
    a, b = (from_short(text, model, pages=4) for text in ("bf16,page=16", "bf16,page=8"))
    plan = compile(a, b)
    k, v = plan.lanes
    object.__setattr__(plan, "lanes", (k, type(v)(**{n: getattr(v, n) for n in v.__slots__} | {"layers": (0, 2)})))
    rng = np.random.default_rng(0)
    src, one, two = Pool.of(a, rng), Pool.of(b, rng), Pool.of(b, rng)
    two.memory[:] = one.memory
    pages = np.arange(2, dtype=np.int64)
    template = Template(plan, src.side(pages), one.side(pages), (0, 16), pair=(0, 0), keys=KEYS)
    for layers in ((0, 1), (1, 3)):
        plain = instantiate(plan, src.side(pages), two.side(pages), (0, 16), layers=range(*layers), keys=KEYS)
        assert digest.run(template.of(layers)) == digest.run(plain)
    assert np.array_equal(one.memory, two.memory)
