"""Time to the first token of two real vLLM engines with a transfer between them, against one engine that does both.

    .venv-vllm/bin/python bench/vllm_pair.py [--rounds N] [--blocks N] [--only TEXT] [--model FOLDER] [--json]

Real engines on the CPU, a process and a thread of compute each, fp32, the bundled model. One request at a time, of tokens that nobody has cached; counted
from when it is handed to the first engine. One engine without a connector, `alone`, stays for the whole run; the pairs come one after the other,
all of them `--blocks` times, and each is measured in turn with `alone`, `--rounds` times a block. Meanwhile its engines are stopped (SIGSTOP): NIXL's
agents take a core each also when there is nothing to do, and `alone` would be charged for it.

    tcp, shm        regauge, both sides in blocks of 32 tokens; the request goes to both engines at once
    tcp, 32 to 128  regauge, decode in blocks of 128
    NixlConnector   vLLM's own, blocks of 32 on both sides; prefill first, then decode with the parameters that it returned

`over`: the pair's time less that of `alone` in the same round. `step`: what `alone` takes for its second token; decode computes the last token of
the prompt again, whatever the connector, so a pair is never faster than a prefill and this. `prefill`: until prefill's own first token; `then`:
from there to decode's, a `step` at best. `after`: from the last layer's `save_kv_layer` on prefill to the commit on decode: what is left of the
transfer when there is nothing to compute any more; `transfer`: from decode's grant to the commit; `hidden`: the share of it that `after` is not.
`cpu`: seconds of CPU, all threads, of the engine alone for two tokens, and of prefill and decode for the same work, a token each: other processes
on the machine change these less than the times.
"""

# ruff: noqa: S311  # prompts

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from os import getloadavg
from pathlib import Path
from typing import Any

from harness import cpu_of, print_table, write_json
from regauge.config import BUNDLED_MODEL, cache_dir
from regauge.engines.local.prepare import prepare

sys.path.append(str(Path(__file__).parents[1] / "tests" / "real_vllm"))
from engines import START_S, Engine, Pair, config, nixl_environment, pair

LENGTHS = (256, 1_000)
WARM = 1
GIVEN: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20}
SETTLED_S = 30.0


@dataclass
class Times:
    """Of one request through a pair, in seconds."""

    first: float
    prefill: float
    cpu: tuple[float, float]
    """Of prefill and decode."""
    after: float | None = None
    transfer: float | None = None
    alone: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The engine alone in the same round: to the first token, from there to the second, CPU."""


@dataclass
class Case:
    """One pair, and what it took."""

    name: str
    transport: str = ""
    blocks: tuple[int, int] = (32, 32)
    times: dict[int, list[Times]] = field(default_factory=lambda: {n: [] for n in LENGTHS})


def cases() -> list[Case]:
    return [
        Case("tcp", "tcp"),
        Case("NixlConnector"),
        Case("tcp, 32 to 128", "tcp", (32, 128)),
        Case("shm", "shm"),
    ]


def prompt(tokens: int) -> list[int]:
    """Tokens that no cache holds."""
    return [random.randrange(100, 40_000) for _ in range(tokens)]


class Cpu:
    """CPU seconds of engines since this was made."""

    def __init__(self, *engines: Engine) -> None:
        self._engines = engines
        self._before = [cpu_of(engine.process.pid) for engine in engines]

    def spent(self) -> list[float]:
        """Return them in the order of the engines."""
        return [cpu_of(e.process.pid) - before for e, before in zip(self._engines, self._before, strict=True)]


def alone(engine: Engine, tokens: int) -> tuple[float, float, float]:
    """Return the seconds to the first token, from there to the second, and of CPU."""
    ids, cpu, begun = prompt(tokens), Cpu(engine), time.monotonic()
    answer = engine.answer(engine.ask(ids, tokens=2))
    return answer["first"] - begun, answer["last"] - answer["first"], cpu.spent()[0]


def through_ours(both: Pair, tokens: int) -> Times:
    ids, cpu, begun = prompt(tokens), Cpu(both.prefill, both.decode), time.monotonic()
    name, p, d = both.begin(ids, tokens=1)
    decode, prefill = both.decode.answer(d), both.prefill.answer(p)
    limit = time.monotonic() + SETTLED_S
    while (sent := both.prefill.stats()["sent"]) is None or sent["transfer"] != name:
        assert time.monotonic() < limit, f"prefill has not heard of the end of {name}"
    received = both.decode.stats()["received"]
    assert (received["transfer"], decode["reason"]) == (name, "length"), (received, decode)
    p_cpu, d_cpu = cpu.spent()
    return Times(
        decode["first"] - begun, prefill["first"] - begun, (p_cpu, d_cpu), received["at"] - sent["computed"], received["seconds"]
    )  # fmt: skip


def through_nixl(prefill: Engine, decode: Engine, tokens: int) -> Times:
    """As vLLM's proxy does: prefill, then decode with what prefill has returned."""
    ids, cpu, begun = prompt(tokens), Cpu(prefill, decode), time.monotonic()
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    first = prefill.answer(prefill.ask(ids, tokens=1, params=asked))
    returned = first["params"]
    returned.pop("remote_prefill_cached_tokens", None)  # would be told as decode's own count of cached tokens
    answer = decode.answer(decode.ask(ids, tokens=1, params=returned))
    assert answer["cached"] >= tokens - 1, f"decode has loaded nothing: {answer}"
    p_cpu, d_cpu = cpu.spent()
    return Times(answer["first"] - begun, first["first"] - begun, (p_cpu, d_cpu))


@dataclass(frozen=True)
class Started:
    """A pair that runs."""

    engines: tuple[Engine, Engine]
    through: Callable[[int], Times]
    """Send a prompt of so many tokens."""

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Neither engine runs meanwhile."""
        for engine in self.engines:
            engine.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for engine in self.engines:
                engine.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def started(case: Case, model: Path, folder: Path) -> Iterator[Started]:
    """Start a pair, and end it."""
    if case.transport:
        sides = [{"block_size": size} for size in case.blocks]
        settings = {"transport": case.transport, "staging_bytes": 64 << 20}
        with pair(model, folder, sides[0], sides[1], transfer=settings, **GIVEN) as both:
            yield Started((both.prefill, both.decode), lambda tokens: through_ours(both, tokens))
        return
    with contextlib.ExitStack() as stack:
        engines: list[Engine] = []
        for role in ("kv_producer", "kv_consumer"):
            transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
            given = config(model, block_size=case.blocks[0], kv_transfer_config=transfer, **GIVEN)
            engines.append(Engine(given, folder / f"{role}.log", nixl_environment()))
            stack.callback(engines[-1].end)
        for engine in engines:
            engine.wait("ready", limit_s=START_S)
        prefill, decode = engines
        yield Started((prefill, decode), lambda tokens: through_nixl(prefill, decode, tokens))


def measure(case: Case, engine: Engine, both: Started, rounds: int) -> None:
    """Take rounds in which the pair and the engine alone take turns in going first."""

    def by_itself(tokens: int) -> tuple[float, float, float]:
        with both.stopped():
            return alone(engine, tokens)

    for round_ in range(rounds + WARM):
        for tokens in LENGTHS:
            before = by_itself(tokens) if round_ % 2 else None
            times = both.through(tokens)
            times.alone = before or by_itself(tokens)
            if round_ >= WARM:
                case.times[tokens].append(times)


def spread(values: Sequence[float]) -> str:
    """Median and quartiles, in ms."""
    low, mid, high = (1e3 * x for x in statistics.quantiles(values, n=4, method="inclusive"))
    return f"{mid:.0f} ({low:.0f}-{high:.0f})"


def row(case: Case, tokens: int) -> dict[str, object]:
    taken = case.times[tokens]
    over = [t.first - t.alone[0] for t in taken]
    out: dict[str, object] = {
        "pair": case.name,
        "tokens": tokens,
        "rounds": len(taken),
        "alone ms": spread([t.alone[0] for t in taken]),
        "pair ms": spread([t.first for t in taken]),
        "over ms": spread(over),
        "over %": 100 * statistics.median(o / t.alone[0] for o, t in zip(over, taken, strict=True)),
        "step ms": spread([t.alone[1] for t in taken]),
        "prefill ms": spread([t.prefill for t in taken]),
        "then ms": spread([t.first - t.prefill for t in taken]),
    }
    left = [t.after for t in taken if t.after is not None]
    whole = [t.transfer for t in taken if t.transfer is not None]
    hidden = [100 * (1 - min(a, w) / w) for a, w in zip(left, whole, strict=True) if w]
    return out | {
        "after ms": f"{1e3 * statistics.median(left):.1f}" if left else "",
        "transfer ms": f"{1e3 * statistics.median(whole):.0f}" if whole else "",
        "hidden %": f"{statistics.median(hidden):.1f}" if hidden else "",
        "cpu s": " ".join(
            f"{statistics.median(each):.2f}" for each in zip(*((t.alone[2], *t.cpu) for t in taken), strict=True)
        ),
    }


def run(options: argparse.Namespace, model: Path) -> list[Case]:
    measured = [case for case in cases() if options.only in case.name]
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(config(model, block_size=32, **GIVEN), Path(folder) / "alone.log")
        try:
            engine.wait("ready", limit_s=START_S)
            for _ in range(options.blocks):
                for case in measured:
                    with started(case, model, Path(folder)) as both:
                        measure(case, engine, both, options.rounds)
                    print_table([row(case, tokens) for tokens in LENGTHS])
                    print(f"load {getloadavg()[0]:.1f}\n", flush=True)
        finally:
            engine.end()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="of each pair in each block")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--only", default="", help="run only pairs whose name contains this")
    parser.add_argument("--model", default="", help="a Hugging Face folder (default: the bundled model)")
    parser.add_argument("--json", action="store_true", help="also write bench/out/vllm_pair.json")
    options = parser.parse_args()
    made = cache_dir() / BUNDLED_MODEL  # as `regauge serve` has left it: what makes it is in another environment
    model = Path(options.model) if options.model else made if made.is_dir() else prepare(BUNDLED_MODEL, cache_dir())
    rows = [row(case, tokens) for case in run(options, model) for tokens in LENGTHS]
    print_table(rows)
    if options.json:
        print(write_json("vllm_pair", rows))


if __name__ == "__main__":
    main()
