"""`regauge top` as a user runs it, against a running gateway."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
from serve_rig import Rig, command, free_port, open_rig
from test_debug import transfer

from regauge.cli import main
from regauge.cli_top import LIVE, Gateway
from regauge.errors import PeerLost
from regauge.move.state import Totals
from regauge.serve.debug import Overview
from regauge.serve.text import Tokenizer


@pytest.mark.anyio
async def test_one_look_as_text_and_as_json(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        rig.decode.transfers = [transfer("0123456789abcdef")]
        rig.decode.totals = Totals(5, 5 << 20, {"lease": 1}, 2, 0)
        code, text, err = await command(rig, "top", "--once")
        assert (code, err) == (0, "")
        assert "decode-0 (decode)  -  5 delivered, 5.0 MiB, 2 resent, 1 failed: 1 lease" in text
        assert re.search(r"01234567 +granted +100 +1\.0 s +p0 .* 50% +1000 B", text)
        assert "\x1b" not in text
        code, text, _ = await command(rig, "top", "--json", "--limit", "3")
        state = msgspec.json.decode(text, type=Overview).workers[1].state
        assert code == 0
        assert state is not None
        assert state.transfers == rig.decode.transfers


@pytest.mark.anyio
async def test_a_worker_that_does_not_answer_is_a_problem(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        await rig.decode.stop()
        await rig.until(lambda: rig.sample("regauge_worker_up", worker="decode-0", role="decode") == 0)
        code, text, _ = await command(rig, "top", "--once")
        assert code == 1
        assert re.search(r"decode-0 \(decode\)  no answer, down since \d\d:\d\d:\d\d UTC: ", text)
        assert "prefill-0 (prefill)  -  0 delivered" in text


@pytest.mark.anyio
async def test_the_view_goes_on_until_ctrl_c_and_shows_rates(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        rig.decode.transfers = [transfer("0123456789abcdef")]
        ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40", "NO_COLOR": "1"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "regauge", "top", "--url", rig.base, "--interval", "0.1",
            stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
        )  # fmt: skip
        os.close(theirs)
        seen = b""
        async with asyncio.timeout(60):
            while b"B/s" not in seen:
                seen += await asyncio.to_thread(os.read, ours, 4096)
            process.send_signal(signal.SIGINT)
            code = None
            while code is None:
                rest = asyncio.ensure_future(asyncio.to_thread(_rest, ours))
                code = await process.wait()
                seen += await rest
        os.close(ours)
        assert code == 0
        text = seen.decode()
        assert "\x1b[?1049h" in text
        assert "\x1b[?1049l" in text, "the screen is given back"
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", text), "colours in spite of NO_COLOR"
        assert "Traceback" not in text


def _rest(fd: int) -> bytes:
    """Read until the other side is closed, which Linux reports as an error."""
    out = b""
    try:
        while part := os.read(fd, 4096):
            out += part
    except OSError:
        pass
    return out


@pytest.mark.anyio
async def test_another_server_is_told_from_a_gateway(rig: Rig) -> None:
    code, _, err = await command(rig, "top", "--url", rig.base + "/v1/models")
    assert code == 1
    assert re.search(r"regauge: error: http://.*/v1/models answers 404: .*not", err)


def test_no_gateway_and_wrong_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["top", "--url", url]) == 1
    assert f"no gateway answers at {url}" in capsys.readouterr().err
    for options, word in (
        (("--url", "127.0.0.1:8000"), "as in http://127.0.0.1:8000"),
        (("--url", "http://x:99999"), "--url http://x:99999"),
        (("--interval", "0"), "--interval 0.0: give at least 0.1 seconds"),
        (("--interval", "nan"), "--interval nan"),
        (("--limit", "0"), "--limit 0: give 1 to 1000"),
        (("--limit", "1001"), "--limit 1001: give 1 to 1000"),
        (("--url", "http://[::1"), "--url http://[::1: Invalid IPv6 URL"),
        (("--url", "http://\x1b[2J"), "--url http://?[2J: "),
    ):
        assert main(["top", *options]) == 2
        assert word in capsys.readouterr().err


@asynccontextmanager
async def odd_server(answer: bytes, *, drip: bytes = b"") -> AsyncIterator[str]:
    """Yield the URL of a server that answers so whatever is asked; with `drip` it then goes on for ever, 50 times a second."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        gone = asyncio.ensure_future(reader.read())
        with suppress(ConnectionError):
            while drip and not (await asyncio.wait([gone], timeout=0.02))[0]:
                writer.write(drip)
                await writer.drain()
        writer.close()
        gone.cancel()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def http(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


DEEP = b"[" * 100_000


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (http(DEEP), "is no gateway of this version: "),
        (http(b'{"version": "\xff"}'), "is no gateway of this version: "),
        (http(b"\xff\xfe"), "is no gateway of this version: "),
        (http(DEEP, "500 No"), r"answers 500: b'\[\["),
        (http(b'{"error": {"message": "\xff"}}', "500 No"), "answers 500: b'"),
        (http(b'{"error": []}', "404 No"), "answers 404: b'"),
        (http(b'{"error": {"message": "a\\u001b[2J\\nb"}}', "404 No"), r"answers 404: a\?\[2J\?b$"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", "no gateway answers at"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 1_000_000, "no gateway answers at"),
        (b"SSH-2.0-OpenSSH\r\n", "no gateway answers at"),
        (b"", "no gateway answers at"),
    ],
)
async def test_what_an_odd_server_answers_is_said_in_one_line(
    answer: bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with odd_server(answer) as url:
        assert await asyncio.to_thread(main, ["top", "--once", "--url", url]) == 1
    err = capsys.readouterr().err
    assert re.search(says, err.rstrip("\n"))
    assert err.count("\n") == 1
    assert err.startswith("regauge: error: ")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "drip"),
    [
        (b"HTTP/1.1 200 OK\r\nx: ", b"y"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
async def test_a_server_that_never_comes_to_an_end_is_given_up(
    answer: bytes, drip: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regauge.cli_top.LIMIT_S", 0.3)
    async with odd_server(answer, drip=drip) as url:
        with pytest.raises(PeerLost, match=r"\(not within 0\.3 s\)"):
            await asyncio.to_thread(Gateway.parse(url).fetch, LIVE)


@pytest.mark.parametrize("host", ["a..b", "é" * 80, "x" * 300])
def test_a_host_that_is_no_name_is_said_in_one_line(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", f"http://{host}:1"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("regauge: error: no gateway answers at")
    assert err.count("\n") == 1
