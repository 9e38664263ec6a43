"""What counts of a leg, whichever links broke: no chunk in part, and the same sum in any order."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.move.counted import Counted, whole, within
from regauge.plan.digest import PRIME


@dataclass(frozen=True)
class Chunk:
    pair: int
    layers: tuple[int, int]
    tokens: tuple[int, int]


LAYERS = 4


@st.composite
def written(draw: st.DrawFn) -> tuple[list[Chunk], list[list[int]]]:
    """Chunks that take every layer's tokens in order, as a sender cuts them, and some of them verified."""
    at, chunks = [0] * LAYERS, []
    for _ in range(draw(st.integers(1, 12))):
        first = draw(st.integers(0, LAYERS - 1))
        end = first + 1
        while end < LAYERS and at[end] == at[first] and draw(st.booleans()):
            end += 1
        stop = at[first] + draw(st.integers(1, 9))
        chunks.append(Chunk(0, (first, end), (at[first], stop)))
        at[first:end] = [stop] * (end - first)
    open_ = [c for c in chunks if draw(st.booleans())]
    done = [min([at[i], *(c.tokens[0] for c in open_ if c.layers[0] <= i < c.layers[1])]) for i in range(LAYERS)]
    return [c for c in chunks if c not in open_], [done]


@given(written())
@settings(deadline=None, derandomize=True, max_examples=400)
def test_no_chunk_counts_in_part(given_: tuple[list[Chunk], list[list[int]]]) -> None:
    chunks, done = given_
    before = [list(each) for each in done]
    kept = whole(chunks, done)
    assert all(now <= then for now, then in zip(done[0], before[0], strict=True))
    assert kept == [c for c in chunks if within(c, done)]
    for chunk in chunks:
        if chunk not in kept:
            assert all(done[0][layer] <= chunk.tokens[0] for layer in range(*chunk.layers))
    for layer in range(LAYERS):  # what is kept of a layer reaches from its start to where it goes on
        reached = sum(c.tokens[1] - c.tokens[0] for c in kept if c.layers[0] <= layer < c.layers[1])
        assert reached == done[0][layer]
    again = [list(each) for each in done]
    assert whole(kept, again) == kept
    assert again == done


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.binary(min_size=8, max_size=8)), max_size=20), st.randoms())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_the_order_of_chunks_does_not_matter(chunks: list[tuple[int, bytes]], random: object) -> None:
    def total(of: list[tuple[int, bytes]]) -> Counted:
        found = Counted()
        for nbytes, digest in of:
            found = found.chunk(nbytes, digest)
        return found

    shuffled = sorted(chunks, key=lambda _: random.random())  # type: ignore[attr-defined]  # a Random
    assert total(shuffled) == total(chunks)
    assert 0 <= total(chunks).sum < PRIME
    assert len(total(chunks).digest) == 16
    half = len(chunks) // 2
    assert total(chunks[:half]) + total(chunks[half:]) == total(chunks)
