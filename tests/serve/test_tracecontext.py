"""What a client may send as `traceparent` and `tracestate`, and what becomes of it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from serve_rig import STEADY

from regauge.config import ServeConfig, decode
from regauge.errors import ConfigError
from regauge.serve.tracecontext import Context, begin, of_client

HEX = "0123456789abcdef"
SOUND = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
near = st.tuples(
    *(st.text(HEX + "gA0 ", min_size=size - 1, max_size=size + 1) | st.text(HEX, min_size=size, max_size=size) | st.just("0" * size)
      for size in (2, 32, 16, 2))
).map("-".join)  # fmt: skip


member = st.tuples(st.text("ab0-*@", min_size=1, max_size=4), st.text("x =~\t", min_size=1, max_size=3)).map("=".join)


def sent(parent: str, *states: str) -> Context | None:
    heads = [(b"traceparent", parent.encode("latin-1")), *((b"tracestate", each.encode("latin-1")) for each in states)]
    return of_client(heads)


@STEADY
@given(near | st.text(st.characters(max_codepoint=255), max_size=80))
def test_what_is_malformed_begins_a_trace_of_its_own(parent: str) -> None:
    found = sent(parent)
    if found is None:
        assert SOUND.fullmatch(parent.strip(" \t")) is None
        fresh = begin(None, records=True)
        assert fresh is not None
        assert SOUND.fullmatch(fresh.headers()["traceparent"])
    else:
        assert parent.strip(" \t")[2:55] == found.headers()["traceparent"][2:]
        theirs = TraceContextTextMapPropagator().extract({"traceparent": parent})
        assert theirs, "what is taken here OpenTelemetry takes, too"


@STEADY
@given(st.binary(max_size=60) | st.lists(member, max_size=40).map(lambda members: ",".join(members).encode()))
def test_a_state_that_goes_on_is_one(state: bytes) -> None:
    found = sent(f"00-{'a' * 32}-{'b' * 16}-01", state.decode("latin-1"))
    assert found is not None
    if not found.state:
        return
    assert len(found.state) <= 512
    assert len(TraceState.from_header([found.state])) >= 1
    assert "\r" not in found.state
    assert "\n" not in found.state


def test_states_of_several_headers_are_one_and_parents_of_several_are_none() -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    found = sent(parent, "a=1", "b=2")
    assert found is not None
    assert found.state == "a=1,b=2"
    assert of_client([(b"traceparent", parent.encode())] * 2) is None
    assert sent(parent + "-more") is None, "version 00 has no more"
    later = sent("01" + parent[2:] + "-more")
    assert later is not None
    assert later.headers() == {"traceparent": parent}


def test_spans_of_a_trace_follow_each_other() -> None:
    client = Context("a" * 32, "b" * 16, state="x=1")
    own = begin(client, records=True)
    assert own is not None
    assert (own.trace_id, own.parent, own.state, own.recorded) == (client.trace_id, client.span_id, "x=1", True)
    under = own.child()
    assert (under.parent, under.trace_id) == (own.span_id, own.trace_id)
    assert len({client.span_id, own.span_id, under.span_id}) == 3
    assert begin(client, records=False) is client


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("collector:4318", "begins with neither"),
        ("ftp://collector", "begins with neither"),
        ("http://", "names no host"),
        ("http://c:99999", "is no URL"),
        ("http://me:secret@c:4318", "has a user or password"),
        ("http://c:4318/v1/traces", "ends with /v1/traces"),
        ("http://c:4318/?a=b", "has a query"),
    ],
)
def test_a_url_that_is_none_is_refused(url: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=f"observe.otlp: .*{fault}.*give a URL as") as caught:
        decode(f'[observe]\notlp = "{url}"'.encode())
    assert "secret" not in str(caught.value)


def test_settings_of_observe() -> None:
    assert ServeConfig().observe.otlp == ""
    assert decode(b'[observe]\notlp = "https://c/prefix/"').observe.traces == "https://c/prefix/v1/traces"
    with pytest.raises(ConfigError, match="oltp"):
        decode(b'[observe]\noltp = "http://c"')
