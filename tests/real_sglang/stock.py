"""Shows what SGLang's own backend for prefill and decode, mooncake_tcp, does with unlike servers, dead ones and messages that are none.

    .venv-sglang/bin/python tests/real_sglang/stock.py [--backend mooncake_tcp|regauge|both] [--keep FOLDER]

Three pairs of real servers on the CPU, with a small random model, one after the other:

| pair | asked |
|---|---|
| float32 in pages of 16, both | greedy tokens, as control; prefill aborts a request; a message that is none; prefill is killed; a prefill that is not there |
| bfloat16 to float32, `--kv-cache-dtype auto` | greedy tokens |
| pages of 16 to pages of 64 | greedy tokens |

What answers should be is transformers' with its own KV cast from one side's dtype to the other's (by_transformers.py). `--backend regauge` asks the same of regauge's, `both` of one after
the other. Every wait has an end. Exit 0: each defect was there with the stock backend, and none with regauge's; 1: something else was seen.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import msgspec
import zmq
from by_transformers import Reference, load
from sglang_client import Answer, call, prompt
from sglang_servers import OURS, STOCK, Pair, Side, Site, pair

from regauge.testing.tiny_models import tiny_model

PROMPTS = [prompt(n, 33 + 15 * n) for n in range(12)]
TOKENS = 12
LONG = prompt(99, 4_000)
"""Computed in chunks of 64 tokens: some seconds, in which something can happen to prefill."""
INTO_IT_S = 0.5
PATIENCE_S = 20.0
"""How long an answer is waited for that ought to come at once."""
SOON_S = 1.0
"""Within which a request is told that its prefill has gone."""
DEATH_S = 30.0


@dataclass(frozen=True)
class Row:
    """One thing that was asked of a pair."""

    backend: str
    asked: str
    seen: str
    seconds: float
    defect: bool | None
    """It was there; None: a control."""


def wanted(model: Path, prefill: str, decode: str) -> Reference:
    """Return what transformers says to each prompt."""
    one = load(model, prefill)
    return Reference(one, one if prefill == decode else load(model, decode), PROMPTS, TOKENS)


def tokens(both: Pair, asked: str, due: Reference, *, control: bool = False) -> Row:
    """Ask for every prompt; a defect is a wrong text with an ordinary end, with regauge also none."""
    begun = time.monotonic()
    answers = [both.through(ids, TOKENS)[1] for ids in PROMPTS]
    took = time.monotonic() - begun
    backend, good = both.prefill.site.backend, sum(answer.good for answer in answers)
    seen = f"{good} of {len(answers)} answered with 200"
    defect = backend == OURS
    if good == len(answers):
        with both.halted():
            verdict = due.judge([answer.ids for answer in answers])
        seen, defect = f"{seen}; {verdict}", not verdict.right
        for answer, best in zip(answers[:2], due.best, strict=False):
            print(f"    {backend} {asked}\n      came {answer.ids}\n      due  {best}")
    return Row(backend, asked, seen, took, None if control else defect)


def pages(both: Pair, asked: str, due: Reference) -> Row:
    """Ask once, then for every prompt where decode is still there; a defect is its end."""
    begun = time.monotonic()
    first = both.begin(PROMPTS[0], TOKENS, limit_s=PATIENCE_S)[1].result()
    limit = DEATH_S if not first.good else 0.0
    code = both.decode.ended(limit)
    took = time.monotonic() - begun
    if code is not None:
        why = both.decode.said(60_000)
        line = next((x for x in why.splitlines() if "RuntimeError:" in x), "no RuntimeError in its log")
        return Row(
            both.prefill.site.backend, asked, f"decode's server has ended, status {code}: {line}", took, defect=True
        )
    row = tokens(both, asked, due)
    return Row(both.prefill.site.backend, asked, f"decode lives; {row.seen}", row.seconds, row.defect)


def orphan(both: Pair) -> Row:
    """Abort a request on prefill alone, half way through its prompt; a defect is a decode that waits on."""
    prefill, decode = both.begin(LONG, TOKENS, limit_s=PATIENCE_S, rid="orphan")
    time.sleep(INTO_IT_S)
    begun = time.monotonic()
    both.prefill.abort("orphan")
    said = prefill.result()
    held = both.decode.used()
    answer = decode.result()
    took = time.monotonic() - begun
    if answer.status:
        seen = f"prefill: {_short(said)}; decode: {_short(answer)}"
    else:
        seen = f"prefill: {_short(said)}; decode says nothing and holds {held} tokens of its pool: given up"
    both.decode.abort("orphan")
    return Row(
        both.prefill.site.backend,
        "prefill aborts a request while it computes",
        seen,
        took,
        not answer.status or took > PATIENCE_S / 2,
    )


def malformed(both: Pair) -> Row:
    """Send one message that is none to wherever the backend listens, then ask; a defect is a server that hangs and says it is well."""
    context = zmq.Context()
    for port in _ports(both):
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 2_000)
        socket.setsockopt(zmq.IMMEDIATE, 0)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send_multipart([b"nonsense", b"", b"", b"x", *[b""] * 4], flags=zmq.NOBLOCK)
        socket.close()
    context.term()  # once all have been sent, or the linger time is over
    begun = time.monotonic()
    answers = both.through(PROMPTS[0], TOKENS, limit_s=PATIENCE_S)
    took = time.monotonic() - begun
    health = [server.health() for server in (both.prefill, both.decode)]
    seen = f"the next request: prefill: {_short(answers[0])}, decode: {_short(answers[1])}; /health of both: {health[0]}, {health[1]}"
    return Row(
        both.prefill.site.backend, "one message that is none to the backend's port", seen, took, not answers[1].good
    )


def _ports(both: Pair) -> list[int]:
    """Where the backend takes messages: mooncake_tcp tells, prefill's port is open to all."""
    if both.prefill.site.backend == OURS:
        return [both.prefill.bootstrap, both.decode.control]
    status, said = call(
        both.prefill.bootstrap, "GET", "/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
    )
    assert status == HTTPStatus.OK, said
    return [msgspec.json.decode(said)["rank_port"]]


def killed(both: Pair) -> Row:
    """Kill prefill's processes half way through a prompt; a defect is a client that is told late."""
    _, decode = both.begin(LONG, TOKENS, limit_s=2 * PATIENCE_S)
    time.sleep(INTO_IT_S)
    begun = time.monotonic()
    both.prefill.kill()
    answer = decode.result()
    took = time.monotonic() - begun
    alive = both.decode.ended() is None
    seen = f"decode: {_short(answer)}; its server {'lives' if alive else 'has ended'}"
    return Row(
        both.prefill.site.backend,
        "prefill's server is killed while it computes",
        seen,
        took,
        not alive or took > SOON_S,
    )


def absent(both: Pair) -> Row:
    """Ask decode for something of the prefill that is dead; a defect is a client that is told late, and not why."""
    begun = time.monotonic()
    answer = both.begin(PROMPTS[0], TOKENS, limit_s=2 * PATIENCE_S)[1].result()
    took = time.monotonic() - begun
    return Row(
        both.prefill.site.backend,
        "a request whose prefill is not there",
        f"decode: {_short(answer)}",
        took,
        took > PATIENCE_S / 4,
    )


def _short(answer: Answer) -> str:
    """Say what came in a line; of SGLang's message what is behind the names of the request."""
    if answer.good:
        return f"{answer.status}, {len(answer.ids)} tokens"
    text = answer.error.rpartition("exception ")[2]
    return f"{answer.status or 'no answer'}, {text[:260]!r}"


def run(backend: str, model: Path, folder: Path) -> Iterator[Row]:
    """Start one pair after the other."""
    like, unlike = wanted(model, "float32", "float32"), wanted(model, "bfloat16", "float32")
    with _pair(backend, model, folder / "like", Side(args=("--chunked-prefill-size", "64")), Side()) as both:
        yield tokens(both, "like servers: float32, pages of 16", like, control=True)
        steps: list[Callable[[Pair], Row]] = [orphan, malformed, killed, absent]
        for step in steps:
            yield step(both)
    with _pair(backend, model, folder / "dtypes", Side("bfloat16"), Side()) as both:
        yield tokens(both, "bfloat16 to float32, KV dtype auto", unlike)
    with _pair(backend, model, folder / "pages", Side(), Side(page=64)) as both:
        yield pages(both, "pages of 16 to pages of 64", like)


@contextlib.contextmanager
def _pair(backend: str, model: Path, folder: Path, prefill: Side, decode: Side) -> Iterator[Pair]:
    folder.mkdir(parents=True)
    begun = time.monotonic()
    with pair(Site(model, folder, backend), prefill, decode) as both:
        both.ready()
        print(f"  {backend}: {prefill} to {decode} ready in {time.monotonic() - begun:.0f} s", flush=True)
        yield both


def show(rows: Sequence[Row]) -> None:
    """Print what was seen: per question one line for each backend."""
    for asked in dict.fromkeys(row.asked for row in rows):
        print(f"\n{asked}")
        for row in rows:
            if row.asked == asked:
                word = {None: "control", True: "DEFECT", False: "fine"}[row.defect]
                print(f"  {row.backend:12}  {word:7}  {row.seconds:6.2f} s  {row.seen}")


def main() -> int:
    """Ask everything of the backends that were named, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=(STOCK, OURS, "both"), default=STOCK)
    parser.add_argument("--keep", type=Path, help="a new folder for the servers' logs")
    options = parser.parse_args()
    backends = (STOCK, OURS) if options.backend == "both" else (options.backend,)
    model = tiny_model("tiny-llama")
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for backend in backends:
            for row in run(backend, model, folder / backend):
                rows.append(row)
                show([row])
                sys.stdout.flush()
    print("\n" + "=" * 20)
    show(rows)
    as_said = all(row.defect is None or row.defect == (row.backend == STOCK) for row in rows)
    print(f"\nran: {', '.join(backends)}; {'as said above' if as_said else 'SOMETHING ELSE than said was seen'}")
    return 0 if as_said else 1


if __name__ == "__main__":
    sys.exit(main())
