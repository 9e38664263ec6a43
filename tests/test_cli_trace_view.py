"""The terminal's time line: every step has a row at its place, for any times, widths and names."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from regauge.cli_trace_view import bar, render, rows
from regauge.move.events import Event
from regauge.serve.recent import Story, Tried
from regauge.serve.tracing import Told, Traced

TIME = st.floats(-1, 1e4)


def line(told: list[Told], *, error: str = "", name: str = "mine") -> Traced:
    story = Story(arrived=0.0, id=name)
    tried = story.attempt("a", "p", "d", "REMAP", "t")
    tried.began = 0.0
    tried.end(2.0, "failed" if error else "complete")
    story.end(error, 0.5, 7, 3)
    story.ended = 2.0
    whole = story.time_line()
    return Traced(whole.request, whole.tries, told, [], [])


def text(found: Traced, width: int = 140) -> str:
    file = io.StringIO()
    Console(width=width, file=file, color_system=None).print(render(found, width))
    return file.getvalue()


def told(*events: Event) -> Told:
    return Told("a", "p", "prefill", "p", 0.0, 0.0001, list(events), 0)


def test_events_of_a_kind_are_one_row_and_others_one_each() -> None:
    found = line([
        told(
            Event("computed", 0.1, 0.2, layers=(0, 1), tokens=(0, 64)), Event("computed", 0.2, 0.3, layers=(1, 2), tokens=(0, 64)),
            Event("computed", 0.3, 0.4, layers=(0, 1), tokens=(64, 70)), Event("computed", 0.4, 0.5, layers=(1, 2), tokens=(64, 70)),
            Event("gather", 0.2, 0.3, nbytes=1 << 20), Event("gather", 0.5, 0.6, nbytes=1 << 20), Event("grant", 0.05, 0.05, "taken"),
            Event("credit", 0.1, 0.1, nbytes=1 << 20), Event("credit", 0.2, 0.2, nbytes=2 << 20), Event("failed", 0.9, 0.9, "a lease ran out"),
        )
    ])  # fmt: skip
    shown = text(found)
    for words in (
        "2 layers computed, 2 chunks of tokens", "2 chunks gathered, 2.0 MiB", "grant ", "2 words of credit, 2.0 MiB",
        "failed (a lease ran out)", "p to d, complete, REMAP", "clocks: p within 0.10 ms",
    ):  # fmt: skip
        assert words in shown, shown
    [attempt] = found.tries
    begun = [row.begin for row in rows(attempt, found.told)]
    assert begun == sorted(begun)


def test_a_failed_request_says_why() -> None:
    assert "failed, 2.00 s, first token after 500 ms; 7 prompt tokens, 3 generated\nthe pool broke" in text(
        line([], error="the pool broke")
    )


def test_names_cannot_steer_the_terminal() -> None:
    found = line(
        [told(Event("failed", 0.1, 0.1, "\x1b[2J[red]x")), told(Event("\x1b[31m", 0.1, 0.1))], name="\x1b]0;x\x07"
    )
    shown = text(found)
    assert "\x1b" not in shown
    assert "[red]x" in shown, "nor is it markup"


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 100))
def test_a_bar_is_within_its_cells_and_seen(begin: float, end: float, cells: int) -> None:
    drawn = bar(begin, max(begin, end), cells)
    assert len(drawn) <= cells
    assert drawn.strip()
    assert set(drawn) <= {" ", "█", "╷"}


@given(
    st.lists(st.tuples(st.sampled_from(["computed", "check", "grant", "step"]), TIME, st.floats(0, 100)), max_size=30),
    st.integers(1, 250),
)
def test_any_times_and_widths_are_shown(events: list[tuple[str, float, float]], width: int) -> None:
    made = [Event(name, at, at + long, layers=(0, 1), tokens=(0, 1)) for name, at, long in events]
    shown = text(line([told(*made)]), width)
    assert all(len(row) <= max(width, 1) for row in shown.splitlines())


def test_an_attempt_without_prefill_is_said() -> None:
    tried = Tried("b", "", "d", "NONE", "", 0.0)
    found = line([])
    assert "d alone, running" in text(Traced(found.request, [tried.view(0.0, 1.0)], [], [], []))
