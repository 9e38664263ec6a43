"""`regauge trace` as a user runs it, against a running gateway."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from serve_rig import command, open_rig
from test_tracing import asked

from perfetto_format import check
from regauge.move.events import Event
from regauge.serve.text import Tokenizer


@pytest.mark.anyio
async def test_a_request_as_text_as_json_and_for_perfetto(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with open_rig(tokenizer) as rig:
        name, now = await asked(rig, "mine"), time.monotonic()
        rig.prefill.events[name] = [
            Event("computed", now + layer, now + layer + 1, layers=(layer, layer + 1), tokens=(0, 9))
            for layer in range(3)
        ]
        rig.decode.events[name] = [
            Event("check", now, now + 1, peer="prefill-0", seq=0), Event("step", now, now + 1), Event("step", now + 1, now + 2)
        ]  # fmt: skip
        code, text, err = await command(rig, "trace", "mine")
        assert (code, err) == (0, "")
        assert "mine: complete, " in text
        assert "prefill-0 to decode-0, complete, CONVERT, " in text
        for words in ("3 layers computed, 1 chunk of tokens", "2 decode steps", "1 chunk checked", "5 tokens"):
            assert words in text
        assert "clocks: decode-0 within" in text
        assert "█" in text
        assert "\x1b" not in text
        code, text, _ = await command(rig, "trace", "mine", "--json")
        assert code == 0
        assert json.loads(text)["request"]["id"] == "mine"
        file = tmp_path / "mine.json"
        code, text, _ = await command(rig, "trace", "mine", "--perfetto", str(file))
        assert code == 0
        body = json.loads(file.read_text())
        check(body)
        assert f"{len(body['traceEvents'])} events; open it at https://ui.perfetto.dev" in text
        assert {"layer 0", "layer 2", "check 0", "step"} <= {e["name"] for e in body["traceEvents"]}


@pytest.mark.anyio
async def test_what_cannot_be_had_is_said(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with open_rig(tokenizer) as rig:
        code, _, err = await command(rig, "trace", "nobody")
        assert code == 1
        assert "'nobody' is not known" in err
        await asked(rig, "mine")
        await rig.decode.stop()
        code, text, _ = await command(rig, "trace", "mine")
        assert code == 0
        assert "decode-0 does not tell: " in text
        code, _, err = await command(rig, "trace", "mine", "--perfetto", str(tmp_path / "no" / "where.json"))
        assert code == 2
        assert "cannot be written" in err
        code, _, err = await command(rig, "trace", "new\nline")
        assert code == 2
        assert "REQUEST_ID" in err
