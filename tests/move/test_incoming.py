"""Why peers have been refused: for how long that answers, and for how many."""

from __future__ import annotations

from regauge.move.incoming import MAX_REFUSED, REFUSED_S, Refusals


def test_a_refusal_answers_for_a_while_unless_it_is_lifted() -> None:
    refusals = Refusals()
    refusals.add("p1", "rope", 5.0)
    assert refusals.reason(["p0", "p1"], 5.0 + REFUSED_S / 2) == "no link from p1: rope"
    assert refusals.reason(["p0"], 5.0) == ""
    assert refusals.reason(["p1"], 5.0 + REFUSED_S) == ""
    refusals.add("p1", "dtype", 20.0)
    assert refusals.reason(["p1"], 20.0) == "no link from p1: dtype"
    refusals.lift("p1")
    assert refusals.reason(["p1"], 20.0) == ""


def test_the_newest_are_remembered() -> None:
    refusals = Refusals()
    for number in range(MAX_REFUSED):
        refusals.add(f"p{number}", "no", 0.0)
    refusals.add("p0", "again", 0.0)
    refusals.add("one more", "no", 0.0)
    assert refusals.reason(["p1"], 0.0) == "", "the oldest went"
    assert refusals.reason(["p0"], 0.0) == "no link from p0: again"
    assert refusals.reason(["one more"], 0.0)
