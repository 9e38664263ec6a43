"""`/debug/live`: the same figures as `/metrics`, the workers beside them; who may ask; its bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve_rig import Rig, open_rig

from regauge.move.state import MAX_SHOWN, Totals
from regauge.serve.debug import Live
from regauge.serve.text import Tokenizer

pytestmark = pytest.mark.anyio
PATH = "/debug/live"
CHAT = {"model": "echo-1", "messages": [{"role": "user", "content": "Tell me of the gauge."}], "max_tokens": 5}
BY_THE_ASKING = ("process_", "regauge_requests_total")
"""Change with every scrape, whoever asks."""


async def look(rig: Rig, query: str = "") -> Live:
    status, body, headers = await rig.get(PATH + query)
    assert (status, headers["content-type"]) == (200, "application/json"), body
    return msgspec.convert(body, Live)


def scraped(text: str) -> dict[tuple[str, frozenset[Any]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created") and not sample.name.startswith(BY_THE_ASKING)
    }


async def test_it_says_what_the_metrics_say(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        rig.decode.totals = Totals(5, 5000, {"lease": 1}, 2, 3)
        for _ in range(3):
            assert (await rig.post("/v1/chat/completions", CHAT))[0] == 200
        await rig.until(lambda: rig.sample("regauge_transfer_failures_total", worker="decode-0", role="decode", reason="lease") == 1)  # fmt: skip
        seen = await look(rig)
        found = {
            (name, frozenset(one.labels.items())): one.value
            for name, several in seen.metrics.items() if not name.startswith(BY_THE_ASKING) for one in several
        }  # fmt: skip
        assert found == scraped(await rig.metrics_text())
        assert found["regauge_completion_tokens_total", frozenset()] == 15
        assert [w.name for w in seen.workers] == ["prefill-0", "decode-0"]
        assert (seen.model, seen.requests) == ("echo-1", 0)


async def test_it_fits_its_schema(rig: Rig) -> None:
    _, document, _ = await rig.get("/openapi.json")
    told = document["paths"][PATH]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert told == {"$ref": "#/components/schemas/Live"}
    schema = document["components"]["schemas"]["Live"]
    _, body, _ = await rig.get(PATH)
    assert set(schema["required"]) == set(body) == {*schema["properties"]}


async def test_of_each_worker_so_many_things_and_no_more(rig: Rig) -> None:
    for limit in ("0", "-1", str(MAX_SHOWN + 1), "many", "9" * 50):
        status, body, _ = await rig.get(f"{PATH}?limit={limit}")
        assert (status, body["error"]["param"]) == (400, "limit")
    assert (await rig.get(f"{PATH}?limit={MAX_SHOWN}"))[0] == 200


@pytest.mark.parametrize("path", [PATH, "/debug/requests", "/debug/trace/req-1"])
async def test_it_is_for_this_machine_alone(path: str, rig: Rig) -> None:
    async with rig.client.get(rig.base + path, headers={"X-Forwarded-For": "10.1.2.3"}) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (403, "loopback_only")
