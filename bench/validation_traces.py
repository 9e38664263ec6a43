"""Three unlike loads for `bench/validation.py`: published traces' shapes, scaled to what a small model does on two cores.

| load | shape | scaled |
|---|---|---|
| conversation | Mooncake's: log-normal lengths with a heavy tail, turns that repeat what went before, Poisson arrivals | mean 12,000 in to some 200; 343 out to 12 |
| code | Azure's 2023 code trace: bursts (coefficient of variation 13 there), long prompts, few tokens out, nothing cached | 2,048 in to some 170, 28 out to 4 |
| agent | Weka's sessions: each turn waits for the answer and thinks, and repeats all before it behind a shared system prompt | 122,000 in to some 500, 440 out to 10; 10 s of thinking to 1 |

Prompts are token ids that follow from the run's name and the blocks' numbers, so that what the real prefix cache finds is what the trace says, and
nothing of the run before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from regauge.sim.trace import Arrival

BLOCK = 64
IDS = (1_000, 10_000)


def conversation(seed: int, count: int) -> list[Arrival]:
    rng = random.Random(seed)  # noqa: S311
    at, fresh = 0.0, 1
    talks: list[tuple[int, ...]] = []
    arrivals = []
    for _ in range(count):
        at += rng.expovariate(1 / 1.15)
        talk = rng.choice(talks) if talks and rng.random() < 0.4 else (0,)
        tokens = min(1_000, 24 + int(rng.lognormvariate(4.7, 0.9)))
        new = tokens // BLOCK
        blocks = (*talk, *range(fresh, fresh + new))
        fresh += new
        if new and len(blocks) < 16:
            talks.append(blocks)
        arrivals.append(_arrival(at, blocks, 1 + rng.randrange(BLOCK - 1), 4 + int(rng.expovariate(1 / 9))))
    return arrivals


def code(seed: int, count: int) -> list[Arrival]:
    rng = random.Random(seed)  # noqa: S311
    at, left = 0.0, 0
    arrivals = []
    for number in range(count):
        if not left:
            at += rng.expovariate(1 / 2.2)
            left = 1 + min(6, int(rng.expovariate(1 / 1.6)))
        left -= 1
        new = min(8, int(rng.lognormvariate(0.5, 0.7)))
        blocks = tuple(10_000 + 16 * number + i for i in range(new))
        arrivals.append(_arrival(at, blocks, 1 + rng.randrange(BLOCK - 1), 2 + int(rng.expovariate(1 / 3))))
        at += rng.uniform(0.0, 0.05)
    return arrivals


def agent(seed: int, count: int, sessions: int = 3) -> list[Arrival]:
    rng = random.Random(seed)  # noqa: S311
    last: list[tuple[int, tuple[int, ...]]] = []
    arrivals: list[Arrival] = []
    for number in range(count):
        mine = number % sessions
        if len(last) <= mine:
            blocks = (0, 1, 2, 3, *(20_000 + 1_000 * mine + i for i in range(2)))
            arrivals.append(_arrival(1.0 * mine, blocks, 20, 6 + rng.randrange(8)))
            last.append((number, blocks))
            continue
        before, blocks = last[mine]
        blocks = (*blocks, *(20_000 + 1_000 * mine + len(blocks) + i for i in range(1 + rng.randrange(2))))
        made = _arrival(0.0, blocks, 1 + rng.randrange(BLOCK - 1), 4 + int(rng.expovariate(1 / 8)))
        think = min(4.0, rng.expovariate(1 / 1.2))
        arrivals.append(Arrival(made.at, made.tokens, made.output, made.blocks, after=before, think_s=think))
        last[mine] = (number, blocks)
    return arrivals


def mixed(seed: int, count: int = 8) -> list[Arrival]:
    """The load of the calibration, which is none of the three: two clients, each waiting for its answer, prompts of any length, half of them new."""
    rng = random.Random(f"mixed {seed}")  # noqa: S311
    arrivals: list[Arrival] = []
    for number in range(count):
        shared = tuple(range(1, 1 + rng.randrange(1, 5))) if rng.random() < 0.5 else ()
        blocks = (*shared, *(50_000 + 16 * number + i for i in range(rng.randrange(7))))
        made = _arrival(0.4 * number, blocks, 1 + rng.randrange(BLOCK - 1), 3 + rng.randrange(14))
        think = rng.uniform(0.0, 0.5)
        arrivals.append(
            made if number < 2 else Arrival(made.at, made.tokens, made.output, made.blocks, number - 2, think)
        )
    return arrivals


LOADS: dict[str, tuple[Callable[[int, int], list[Arrival]], int]] = {
    "conversation": (conversation, 18),
    "code": (code, 20),
    "agent": (agent, 24),
}
"""With the number of requests of a run: some 20 s each."""


def prompts(arrivals: Sequence[Arrival], run: str) -> list[list[int]]:
    """Return the token ids of each arrival: equal blocks of one run are equal ids, all else differs."""
    made: dict[int, list[int]] = {}
    found = []
    for number, arrival in enumerate(arrivals):
        ids: list[int] = []
        for block in arrival.blocks:
            if block not in made:
                made[block] = _ids(BLOCK, f"{run} block {block}")
            ids += made[block]
        found.append(ids + _ids(arrival.tokens - len(ids), f"{run} rest {number}"))
    return found


def _arrival(at: float, blocks: tuple[int, ...], rest: int, output: int) -> Arrival:
    """Return an arrival of these blocks and a last, partial one, so that the cache never holds a whole prompt."""
    return Arrival(at, len(blocks) * BLOCK + rest, min(output, 48), blocks)


def _ids(count: int, name: str) -> list[int]:
    rng = random.Random(name)  # noqa: S311
    return [rng.randrange(*IDS) for _ in range(count)]
