"""Registers a prefill worker `astray` once: GATEWAY KEY_FILE HOST. Prints the status, once the gateway has had time to take it in or leave it out."""

import asyncio
import sys
import time
from pathlib import Path

import aiohttp
import msgspec

from regauge.move.auth import load_key
from regauge.serve import wire
from regauge.serve.registration import PATH, PERIOD_S, sign
from regauge.serve.registry import Entry


async def register(gateway: str, key_file: str, host: str) -> int:
    rank = wire.RankAddress("astray", None)
    entry = Entry(wire.WorkerAddress("astray", "prefill", f"http://{host}:9000", [rank]), instance="1", lease_s=60)
    body = msgspec.json.encode(entry)
    header = sign(load_key(Path(key_file)), "POST", PATH, body, time.time())
    async with (
        aiohttp.ClientSession() as session,
        session.post(gateway + PATH, data=body, headers={"Authorization": header}) as answer,
    ):
        status = answer.status
    await asyncio.sleep(2 * PERIOD_S)  # it looks at what it was told so often
    return status


if __name__ == "__main__":
    print(asyncio.run(register(*sys.argv[1:])))
