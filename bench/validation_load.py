"""The client of `bench/validation.py`, a process of its own: sends a plan's requests at their times, and says what came when.

python bench/validation_load.py < PLAN.json > ANSWERS.json
"""

from __future__ import annotations

import asyncio
import sys
import time

import aiohttp
import msgspec

from regauge.engines.streaming import TIMEOUT_S, Answer, Endpoint, ask

LEAD_S = 0.3


class Ask(msgspec.Struct):
    """One request."""

    at: float
    ids: list[int]
    output: int
    after: int = -1
    """Place of the one whose end it waits for, and then `think_s`; -1: it comes at `at`."""
    think_s: float = 0.0


class Plan(msgspec.Struct):
    """All requests, and where they go."""

    url: str
    model: str
    asks: list[Ask]


class Came(msgspec.Struct):
    """What came of a request; times are seconds of the machine's monotonic clock."""

    sent: float
    pieces: list[float]
    ended: float
    prompt: int
    cached: int
    output: int

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.pieces[0] - self.sent


class Answers(msgspec.Struct):
    """What came of all."""

    start: float
    """Of the plan, by the same clock."""
    came: list[Came]


async def run(plan: Plan) -> Answers:
    """Send all requests. Raises EngineError for the first that fails."""
    start = time.monotonic() + LEAD_S
    ends = [asyncio.Event() for _ in plan.asks]
    to = Endpoint(plan.url, plan.model)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), connector=connector) as session,
        asyncio.TaskGroup() as group,
    ):

        async def one(number: int, each: Ask) -> Came:
            if each.after >= 0:
                await ends[each.after].wait()
                await asyncio.sleep(each.think_s)
            else:
                await asyncio.sleep(start + each.at - time.monotonic())
            answer = await ask(session, to, each.ids, each.output)
            ends[number].set()
            return _came(answer)

        tasks = [group.create_task(one(number, each)) for number, each in enumerate(plan.asks)]
    return Answers(start, [task.result() for task in tasks])


def _came(answer: Answer) -> Came:
    return Came(answer.sent, list(answer.pieces), answer.ended, answer.prompt, answer.cached, answer.output)


if __name__ == "__main__":
    found = asyncio.run(run(msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)))
    sys.stdout.buffer.write(msgspec.json.encode(found))
