"""Time to the first token of a pair of real SGLang servers, with regauge between them and with SGLang's own backend, against one server alone.

    .venv-sglang/bin/python bench/sglang_pair.py [--rounds N] [--chunk N] [--model FOLDER] [--json]

Real servers on the CPU over HTTP, fp32, pages of 16 on both sides (DIRECT), a thread of compute each, the bundled model. One request at a time, of
tokens that nobody has cached, streamed; counted from when it is sent until the first token is there. What goes through a pair goes
to both of its servers at once, as a router does, and the token is decode's.

    alone         one server that does both
    mooncake_tcp  SGLang's own backend: Mooncake's transfer engine over loopback
    regauge       over loopback, too

All five servers run from the beginning; in each round the three take turns, in an order that changes, and the servers of the others are stopped
(SIGSTOP): an SGLang scheduler takes a core also when there is nothing to do. A short request, not counted, goes first when they go on. On two
cores a pair has both for itself, and `alone` likewise: what it says is what a hand-over adds on a machine with nothing to spare.

`over`: the pair's time less that of `alone` in the same round. `over / stock's`: of that, in the same round, median.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import getloadavg
from pathlib import Path

from harness import print_table, write_json
from regauge.config import BUNDLED_MODEL, cache_dir
from regauge.engines.local.prepare import prepare

sys.path.append(str(Path(__file__).parents[1] / "tests" / "real_sglang"))
from sglang_client import Answer
from sglang_servers import OURS, STOCK, Pair, Server, Side, Site, pair

LENGTHS = (256, 1_024)
WARM = 1
SHORT = 16
ALONE = "alone"
TOKENS = 4


@dataclass(frozen=True)
class Measured:
    """Something that answers, and may be stopped meanwhile."""

    name: str
    servers: tuple[Server, ...]
    ask: Callable[[list[int]], Answer]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """It runs, and has answered something."""
        for server in self.servers:
            server.send(signal.SIGCONT)
        try:
            self.first(SHORT)
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """None of its servers runs."""
        for server in self.servers:
            server.send(signal.SIGSTOP)

    def first(self, tokens: int) -> float:
        """Return the seconds to the first token of the answer to a prompt that no cache holds."""
        answer = self.ask([random.randrange(100, 40_000) for _ in range(tokens)])
        assert answer.good, f"{self.name}: {answer}"
        return answer.first


def round_of(measured: Sequence[Measured], number: int) -> dict[int, dict[str, float]]:
    """Return the seconds of each, per length; who goes first changes from round to round."""
    out: dict[int, dict[str, float]] = {tokens: {} for tokens in LENGTHS}
    turned = [*measured[number % len(measured) :], *measured[: number % len(measured)]]
    for each in turned if number % 2 else turned[::-1]:
        with each.running():
            for tokens in LENGTHS:
                out[tokens][each.name] = each.first(tokens)
    return out


def spread(values: Sequence[float]) -> str:
    """Median and quartiles, in ms."""
    low, mid, high = (1e3 * x for x in statistics.quantiles(values, n=4, method="inclusive"))
    return f"{mid:.0f} ({low:.0f}-{high:.0f})"


def rows(rounds: Sequence[dict[int, dict[str, float]]], names: Sequence[str]) -> list[dict[str, object]]:
    """Return a line per length and pair."""
    out: list[dict[str, object]] = []
    for tokens in LENGTHS:
        taken = [round_[tokens] for round_ in rounds]
        stock = [each[STOCK] - each[ALONE] for each in taken] if STOCK in names else []
        for name in names:
            over = [each[name] - each[ALONE] for each in taken]
            out.append(
                {
                    "tokens": tokens,
                    "pair": name,
                    "rounds": len(taken),
                    "alone ms": spread([each[ALONE] for each in taken]),
                    "pair ms": spread([each[name] for each in taken]),
                    "over ms": spread(over),
                    "over %": 100 * statistics.median(o / each[ALONE] for o, each in zip(over, taken, strict=True)),
                    "over less stock's ms": spread([o - s for o, s in zip(over, stock, strict=True)]) if stock else "",
                    "pair / stock": statistics.median(each[name] / each[STOCK] for each in taken) if stock else 0.0,
                }
            )
    return out


def run(options: argparse.Namespace, model: Path, folder: Path) -> list[dict[str, object]]:
    """Start everything, measure, and end it."""
    side = Side(args=("--chunked-prefill-size", str(options.chunk)) if options.chunk else ())
    names = [name for name in (STOCK, OURS) if options.only in name]
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(Server(model, folder / "alone.log", side))
        pairs = []
        for name in names:
            (folder / name).mkdir()
            pairs.append(stack.enter_context(pair(Site(model, folder / name, name), side, side)))
        measured = [Measured(ALONE, (one,), lambda ids: one.generate(ids, TOKENS, stream=True))]
        measured += [Measured(both.prefill.site.backend, (both.prefill, both.decode), _through(both)) for both in pairs]
        one.ready()
        for both in pairs:
            both.ready()
        for each in measured:
            each.stop()
        taken = []
        for number in range(WARM + options.rounds):
            taken.append(round_of(measured, number))
            print(f"round {number} {taken[-1]} load {getloadavg()[0]:.1f}", flush=True)
    return rows(taken[WARM:], names)


def _through(both: Pair) -> Callable[[list[int]], Answer]:
    def ask(ids: list[int]) -> Answer:
        prefill, decode = both.through(ids, TOKENS, stream=True)
        assert prefill.good, f"{both.prefill.site.backend}, prefill: {prefill}"
        return decode

    return ask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a chunk of prefill (default: SGLang's)")
    parser.add_argument("--only", default="", help="run only pairs whose name contains this")
    parser.add_argument("--model", default="", help="a Hugging Face folder (default: the bundled model)")
    parser.add_argument("--json", action="store_true", help="also write bench/out/sglang_pair.json")
    options = parser.parse_args()
    made = cache_dir() / BUNDLED_MODEL  # as `regauge serve` has left it: what makes it is in another environment
    model = Path(options.model) if options.model else made if made.is_dir() else prepare(BUNDLED_MODEL, cache_dir())
    with tempfile.TemporaryDirectory() as folder:
        out = run(options, model, Path(folder))
    print_table(out)
    if options.json:
        print(write_json("sglang_pair", out))


if __name__ == "__main__":
    main()
