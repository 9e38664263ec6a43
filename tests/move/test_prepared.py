"""What a link keeps between chunks: the same keys on both ends, the same template for the same tokens, and not more than it may."""

import numpy as np

from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import Array
from regauge.move import prepared
from regauge.move.prepared import Templates, TransferKeys
from regauge.plan import Side, compile
from regauge.plan.template import Template

MODEL = attention_model("m", 1, Array(1, 8))


def template() -> Template:
    layout = from_short("bf16,page=16", MODEL, pages=2)
    side = Side(np.arange(1, dtype=np.int64), {"k": 0, "v": 0})
    return Template(compile(layout, layout), side, side, (0, 4), pair=(0, 0))


def test_both_ends_draw_the_same_keys_and_each_epoch_has_its_own() -> None:
    one, two = TransferKeys(b"k" * 32, "session"), TransferKeys(b"k" * 32, "session")
    with one.of("t", 1) as a, two.of("t", 1) as b, one.of("t", 2) as c, TransferKeys(b"k" * 32, "x").of("t", 1) as d:
        words = [keys.words.tobytes() for keys in (a, b, c, d)]
    assert words[0] == words[1]
    assert len(set(words)) == 3


def test_a_template_is_made_once_and_the_oldest_goes() -> None:
    kept, made = Templates(), []

    def get(key: int) -> Template:
        def make() -> Template:
            made.append(key)
            return template()

        return kept.get(key, make)

    first = get(0)
    assert get(0) is first
    for key in range(1, prepared._TEMPLATES_KEPT):
        get(key)
    assert get(0) is first  # used last
    get(-1)
    assert get(0) is first
    get(1)
    assert made == [*range(prepared._TEMPLATES_KEPT), -1, 1]
