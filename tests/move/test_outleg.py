"""How a leg cuts chunks: whole layers where they fit, else round numbers of tokens, never more than credit allows."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.move import messages as m
from regauge.move.outleg import ROUND_TOKENS, LinkTerms, OutLeg
from regauge.move.protocol import Part

UNIT = 10


def leg(layers: int, tokens: int, *, credit: int | None, room: int, staged: bool = True) -> tuple[OutLeg, LinkTerms]:
    part = Part(0, tuple(range(layers)), token_bytes=UNIT)
    terms = LinkTerms(
        (part,), lambda _, count: count * UNIT, frozenset({0} if staged else ()), slots=64, slot_bytes=room,
        chunk_bytes=room,
    )  # fmt: skip
    out = OutLeg("d")
    out.granted(m.Grant("t", 1, [m.Table([0], 0)], 0, 1.0, credit, []), terms.parts, tokens, 1.0)
    out.computed(terms.parts, dict.fromkeys(range(layers), tokens), tokens)
    return out, terms


def drain(out: OutLeg, terms: LinkTerms, *, grow: int = 0) -> None:
    """Take chunks until nothing is left; where credit ends, the chunks in flight land and more comes."""
    while out.remaining:
        if out.next(terms, [0]) is not None:
            continue
        out.flight.clear()
        if out.next(terms, [0]) is None:
            assert out.credit is not None
            assert grow
            out.credit += grow


@settings(max_examples=50, deadline=None)
@given(layers=st.integers(1, 5), tokens=st.integers(1, 700), room=st.integers(16 * UNIT, 9_000))
def test_all_crosses_in_few_sizes_that_fit(layers: int, tokens: int, room: int) -> None:
    out, terms = leg(layers, tokens, credit=None, room=room)
    drain(out, terms)
    assert sum((c.tokens[1] - c.tokens[0]) * (c.layers[1] - c.layers[0]) for c in out.chunks) == layers * tokens
    assert all(c.nbytes <= room for c in out.chunks)
    odd = [c for c in out.chunks if (n := c.tokens[1] - c.tokens[0]) % ROUND_TOKENS and n & (n - 1)]
    assert all(c.tokens[1] == tokens for c in odd), "only what ends a prompt is not round"


@settings(max_examples=50, deadline=None)
@given(tokens=st.integers(1, 700), quantum=st.integers(16 * UNIT, 9_000))
def test_credit_is_used_up_to_a_round_number_and_the_rest_waits(tokens: int, quantum: int) -> None:
    out, terms = leg(2, tokens, credit=quantum, room=5_000)
    drain(out, terms, grow=quantum)
    assert out.credit is not None
    assert out.taken == 2 * tokens * UNIT <= out.credit
    odd = [c for c in out.chunks if (n := c.tokens[1] - c.tokens[0]) % ROUND_TOKENS and n & (n - 1)]
    assert all(c.tokens[1] == tokens for c in odd), "only what ends a prompt is not round"


def test_a_remnant_of_credit_waits_for_what_is_in_flight() -> None:
    out, terms = leg(1, 1000, credit=500 * UNIT, room=1 << 20)
    free = list(range(8))
    assert out.next(terms, free) == 0
    assert out.chunks[0].tokens == (0, 3 * ROUND_TOKENS)
    assert out.next(terms, free) is None, "116 tokens of credit: more comes when the first chunk has landed"
    out.flight.clear()
    assert out.next(terms, free) == 1
    assert out.chunks[1].tokens == (384, 448)


def test_only_the_layers_that_are_named_are_looked_at() -> None:
    out, terms = leg(4, 100, credit=10_000, room=1 << 20)
    out.parts[0].computed = [0] * 4
    ready = dict.fromkeys(range(4), 50)
    out.computed(terms.parts, ready, 100, (1, 3))
    assert out.parts[0].computed == [0, 50, 50, 0]
    assert out.want(terms) == 100 * UNIT
    out.computed(terms.parts, ready, 100)
    assert out.parts[0].computed == [50] * 4
    assert out.want(terms) == 200 * UNIT
    assert out.want(terms) is None
