"""What `bench/validation.py` measures on: a real `regauge serve` with one prefill and one decode worker, its client, and calibration runs.

A calibration run is apart from the runs that are compared, with prompts of its own. It asks, through the same gateway and by the same client:

* prompts alone, of several lengths, one with a cached beginning: the worker's own time of computing, and the client's of the first token;
* batches of answers, of which the prompts are cached: the time between tokens while all of a batch decode;
* prompts one after the other while 1 or 4 answers are decoded: what each does to the other on two cores.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from regauge.config import BUNDLED_MODEL
from regauge.engines.timed_server import together
from regauge.serve.ports import free_ports
from regauge.sim.calibrate import (
    Batch,
    Beside,
    Latency,
    Prompt,
    PromptTimes,
    StepTimes,
    beside,
    latency,
    prompt_times,
    step_times,
)
from regauge.sim.drift import Drift
from validation_load import Answers, Ask, Came, Plan
from validation_metronome import metronomes, pin, workers
from validation_traces import IDS

CHUNK = 256
PAGE = 16
POOL = 32_768
SETTINGS = (
    "prefill.threads=1", "decode.threads=1", f"prefill.pool_tokens={POOL}", f"decode.pool_tokens={POOL}", f"prefill.chunk_tokens={CHUNK}",
)  # fmt: skip
SHORT = (4, 16, 48, 96, 160, 256)
LONG = (400, 640, 1_000)
CACHED = 512
BATCHES = ((1, 133), (2, 133), (4, 133), (8, 133), (1, 645), (4, 645))
"""Requests, and tokens of each; 128 and 640 of them are cached."""
ANSWER = 12
BESIDE = (1, 4)
CHAIN = (256, 400)
READY_S = 300.0
CORES = tuple(sorted(os.sched_getaffinity(0)))
ON = {"prefill-0": CORES[0], "decode-0": CORES[-1]}
"""Which core each worker is kept on."""
PIECES = {CORES[0]: "gemm", CORES[-1]: "stream"}
"""What the metronome of each core computes: of two, the one whose cost goes more with the steps of the worker there (bench/LOG.md)."""


@dataclass
class Stand:
    """A running deployment."""

    url: str
    log: Path
    beats: Callable[[int], list[tuple[float, float]]]
    """A core's so far: seconds of the monotonic clock, and the cost of the metronome's piece."""
    _read: int = 0

    def ask(self, asks: Sequence[Ask]) -> list[Came]:
        """Have the client send requests, and wait for all of them."""
        return self.answers(asks).came

    def answers(self, asks: Sequence[Ask]) -> Answers:
        """Do the same; say when they began to be sent, too."""
        plan = msgspec.json.encode(Plan(self.url, BUNDLED_MODEL, list(asks)))
        client = Path(__file__).with_name("validation_load.py")
        ran = subprocess.run([sys.executable, str(client)], input=plan, stdout=subprocess.PIPE, check=True)
        return msgspec.json.decode(ran.stdout, type=Answers)

    def prefilled(self, count: int) -> list[dict[str, float]]:
        """Return what the prefill worker said of the prompts since the last call, which are so many."""
        end = time.monotonic() + 10
        while True:
            lines = self.log.read_text(errors="replace").splitlines()
            found = [json.loads(line) for line in lines if re.match(r'\{.*"event": "prefilled"', line)][self._read :]
            if len(found) >= count:
                self._read += len(found)
                assert len(found) == count, (len(found), count)
                return found
            assert time.monotonic() < end, (len(found), count)
            time.sleep(0.1)


@contextlib.contextmanager
def serving(folder: Path, *, clockwork: bool = False) -> Iterator[Stand]:
    """Run the deployment, each worker on a core of its own, beside a metronome. `clockwork`: steps take known times, and compute nothing."""
    if len(CORES) < 2:
        raise SystemExit("two cores are wanted, one for each worker")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).with_name("clockwork"))} if clockwork else None
    [port] = free_ports("127.0.0.1")
    settings = [word for each in SETTINGS for word in ("--set", each)]
    with metronomes(folder, PIECES) as beats, (folder / "serve.log").open("wb") as log:
        stand = Stand(f"http://127.0.0.1:{port}", folder / "serve.log", beats)
        command = [sys.executable, "-m", "regauge", "serve", "--port", str(port), "--log-json", *settings]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            _wait(stand.url, process)
            warm_up(stand)  # all threads are there then
            found = workers(process.pid)
            assert found.keys() == ON.keys(), (found, ON)
            for name, core in ON.items():
                pin(found[name], core)
            yield stand
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:  # noqa: S310  # our own
                if answer.status == 200 and json.load(answer)["status"] == "ready":
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"{url} did not become ready")


Window = tuple[float, float]
"""Begin and end, seconds of the monotonic clock."""


@dataclass
class Samples:
    """What the calibration runs measured, all rounds together, and when: what else a core did in that time is known only there."""

    alone: list[tuple[Prompt, Window]] = field(default_factory=list)
    first: list[tuple[int, float, float]] = field(default_factory=list)
    """Tokens, seconds to the first token at the client, seconds of computing."""
    steps: list[tuple[Batch, Window]] = field(default_factory=list)
    beside: list[tuple[Prompt, Window]] = field(default_factory=list)
    steps_beside: list[tuple[Batch, float, Window]] = field(default_factory=list)
    """With the share of the time in which prompts were computed."""


@dataclass(frozen=True)
class Calibrated:
    """The constants that the simulator gets."""

    prompts: PromptTimes
    steps: StepTimes
    beside: Beside
    latency: Latency


def fitted(samples: Samples, drift: Drift) -> Calibrated:
    """Return the constants at the cores' usual speed: each sample is divided by how many times as long its core took in its window."""

    def prompt(each: Prompt, window: Window) -> Prompt:
        return replace(each, seconds=each.seconds / drift.prompt.during(*window))

    def step(each: Batch, window: Window) -> Batch:
        return replace(each, seconds=each.seconds / drift.step.during(*window))

    prompts = prompt_times([prompt(*each) for each in samples.alone], CHUNK)
    steps = step_times([step(*each) for each in samples.steps])
    both = [prompt(*each) for each in samples.beside]
    steps_beside = [(step(each, window), share) for each, share, window in samples.steps_beside]
    return Calibrated(prompts, steps, beside(both, prompts, steps_beside, steps), latency(samples.first))


def warm_up(stand: Stand) -> None:
    """Ask what is not counted: the first requests of a process make much that is there later."""
    rng = random.Random("warm")  # noqa: S311
    asks = _chain([(_ids(rng, n), 4) for n in (700, 60, 300)])
    stand.ask([*asks, *(Ask(0.5, _ids(rng, 100), 12) for _ in range(4))])
    stand.prefilled(7)


def calibrate(stand: Stand, samples: Samples, seed: int) -> None:
    """Make one calibration run, and add what it measured."""
    rng = random.Random(f"calibration {seed}")  # noqa: S311
    _alone(stand, samples, rng)
    _steps(stand, samples, rng)
    for batch in BESIDE:
        _beside(stand, samples, rng, batch)


def _alone(stand: Stand, samples: Samples, rng: random.Random) -> None:
    prompts = [_ids(rng, n) for n in rng.sample([*SHORT, *SHORT, *LONG], 2 * len(SHORT) + len(LONG))]
    long = next(p for p in prompts if len(p) == max(LONG))
    prompts.append(long[:CACHED] + _ids(rng, 88))
    came = stand.ask(_chain([(p, 2) for p in prompts]))
    for each, said in zip(came, stand.prefilled(len(prompts)), strict=True):
        assert said["tokens"] == each.prompt
        samples.alone.append((Prompt(each.prompt, each.cached, said["prefill_s"]), (each.sent, each.pieces[0])))
        samples.first.append((each.prompt, each.ttft_s, said["prefill_s"]))
    assert came[-1].cached == CACHED, came[-1]


def _steps(stand: Stand, samples: Samples, rng: random.Random) -> None:
    asks: list[Ask] = []
    groups: list[range] = []
    for batch, tokens in rng.sample(BATCHES, len(BATCHES)):
        asks += _group(rng, batch, tokens, ANSWER, after=len(asks) - 1)
        groups.append(range(len(asks) - batch, len(asks)))
    came = stand.ask(asks)
    stand.prefilled(len(asks))
    for group in groups:
        pieces = [came[i].pieces for i in group]
        step = together(pieces, came[group[0]].prompt)
        window = (max(each[0] for each in pieces), min(each[-1] for each in pieces))
        samples.steps.append((Batch(len(group), step.resident, step.seconds), window))


def _beside(stand: Stand, samples: Samples, rng: random.Random, batch: int) -> None:
    """Prompts are computed one after the other while answers go on; what the answers do not outlast does not count."""
    asks = _group(rng, batch, 133, 48, after=-1)
    streams, chained = range(1, len(asks)), len(asks)
    chain = _chain([(_ids(rng, n), 1) for n in rng.sample(CHAIN, len(CHAIN))])
    # The first of the chain comes when the primer has ended and the answers have begun.
    first = msgspec.structs.replace(chain[0], after=0, think_s=1.0)
    later = [msgspec.structs.replace(each, after=chained + i, think_s=0.0) for i, each in enumerate(chain[1:])]
    came = stand.ask([*asks, first, *later])
    said = [each for each in stand.prefilled(len(came)) if each["tokens"] in CHAIN]
    begun, over = max(came[i].pieces[0] for i in streams), min(came[i].ended for i in streams)
    both = [(c, s) for c, s in zip(came[chained:], said, strict=True) if begun < c.sent and c.ended < over]
    if not both:
        print(f"calibration beside {batch}: the answers and the prompts missed each other; is the machine busy?")
        return
    samples.beside += [
        (Prompt(int(s["tokens"]), int(s["cached"]), s["prefill_s"]), (c.sent, c.pieces[0])) for c, s in both
    ]
    begin, end = both[0][0].sent, both[-1][0].ended
    pieces = [[at for at in came[i].pieces if begin <= at <= end] for i in streams]
    before = sum(at < begin for i in streams for at in came[i].pieces)
    step = together(pieces, 133)
    share = min(1.0, sum(s["prefill_s"] for _, s in both) / (end - begin))
    samples.steps_beside.append((Batch(batch, step.resident + before, step.seconds), share, (begin, end)))


def _group(rng: random.Random, batch: int, tokens: int, answer: int, after: int) -> list[Ask]:
    """Return a prompt alone, and then as many as `batch` at once that repeat all of it but the last block."""
    shared = _ids(rng, tokens - 5)
    primer = Ask(0.0, shared + _ids(rng, 5), 1, after=after, think_s=0.15)
    return [primer, *(Ask(0.0, shared + _ids(rng, 5), answer, after=after + 1, think_s=0.1) for _ in range(batch))]


def _chain(given: Sequence[tuple[list[int], int]]) -> list[Ask]:
    """Return requests of which each waits for the one before."""
    return [
        Ask(0.0, ids, output, after=i - 1, think_s=0.02)
        for i, (ids, output) in zip(itertools.count(), given, strict=False)
    ]


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(*IDS) for _ in range(count)]
