import pytest

from regauge.errors import PeerLost
from regauge.move.ticket import Ticket


def test_callbacks_run_once_and_may_raise(caplog: pytest.LogCaptureFixture) -> None:
    ticket, states = Ticket(10), list[str]()

    def broken(_: Ticket) -> None:
        raise LookupError("a caller's mistake")

    ticket.add_done_callback(broken)
    ticket.add_done_callback(lambda each: states.append(each.state))
    assert not ticket.wait(0.0)
    assert ticket.finish("landed")
    assert not ticket.finish("failed", PeerLost("too late"))
    ticket.add_done_callback(lambda each: states.append(each.reason))
    assert states == ["landed", ""]
    assert "a caller's mistake" in caplog.text


def test_progress_counts_until_the_end_and_the_reason_can_be_raised() -> None:
    ticket = Ticket(10)
    states: list[str] = [ticket.state]
    ticket.advance(0)
    states.append(ticket.state)
    assert states == ["queued", "sending"]
    ticket.advance(4)
    ticket.finish("failed", PeerLost("it went away"))
    ticket.advance(6)
    assert (ticket.state, ticket.bytes_done, ticket.reason) == ("failed", 4, "it went away")
    with pytest.raises(PeerLost, match="went away"):
        ticket.check()
