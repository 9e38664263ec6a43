"""How fast each core computes at each moment: a process on each, which now and then computes a small fixed piece and notes what it cost.

    python bench/validation_metronome.py CORE PIECE... > BEATS

It knows nothing of requests: it has its own clock and its own data. A cost is of the thread's own time, so that waiting for the core does not count, and
is taken after others in a row, with the piece's data in the core's cache. What a worker does to the piece all the same, `bench/validation.py` says
("metronome beside ...").
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

BEAT_S = 0.1
"""With the pieces' millisecond, five times, a core spends some 5 % on this: in calibration as in the runs that are compared."""
WARM = 4
"""Pieces before the one that is timed. On a core that was idle the first costs twice as much, the second 10 to 18 % more, from the third on hardly."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def gemm() -> Callable[[], object]:
    """Products of matrices that lie in a core's second-level cache: arithmetic, as in prompts."""
    a, b = np.ones((192, 192), np.float32), np.ones((192, 192), np.float32)
    out = np.empty_like(a)

    def run() -> None:
        for _ in range(6):
            np.matmul(a, b, out=out)

    return run


def stream() -> Callable[[], object]:
    """A vector times a matrix of 16 MiB, far more than a core's second-level cache: weights that are read, as in decode steps."""
    matrix, vector = np.ones((2048, 2048), np.float32), np.ones(2048, np.float32)
    out = np.empty(2048, np.float32)

    def run() -> None:
        np.matmul(matrix, vector, out=out)

    return run


PIECES = {"gemm": gemm, "stream": stream}


def main(core: int, names: Sequence[str]) -> None:
    os.sched_setaffinity(0, {core})
    pieces = [PIECES[name]() for name in names]
    due = time.monotonic()
    while True:
        due = max(due + BEAT_S, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        costs = []
        for piece in pieces:
            for _ in range(WARM):
                piece()
            begun = time.thread_time()
            piece()
            costs.append(time.thread_time() - begun)
        print(f"{time.monotonic():.4f}", *(f"{1e3 * cost:.4f}" for cost in costs), flush=True)


def workers(parent: int) -> dict[str, int]:
    """Return the workers' process ids of a `regauge serve`, by their names."""
    found = {}
    for each in Path("/proc").iterdir():
        if not each.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended
            words = (each / "cmdline").read_text().split("\0")
            above = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            if above == parent and "regauge.serve.worker_process" in words:
                found[Path(words[-2]).stem] = int(each.name)
    return found


def pin(process: int, core: int) -> None:
    """Keep all threads of a process on a core; later ones inherit it."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


@contextlib.contextmanager
def metronomes(folder: Path, pieces: dict[int, str]) -> Iterator[Callable[[int], list[tuple[float, float]]]]:
    """Run one on each core with its piece; yields what reads a core's beats so far: seconds of the monotonic clock, and cost in seconds."""
    started: list[subprocess.Popen[bytes]] = []

    def read(core: int) -> list[tuple[float, float]]:
        lines = (folder / f"beats-{core}").read_text().rpartition("\n")[0].splitlines()
        return [(float(at), 1e-3 * float(cost)) for at, cost in map(str.split, lines)]

    try:
        for core, piece in pieces.items():
            with (folder / f"beats-{core}").open("wb") as out:
                command = [sys.executable, __file__, str(core), piece]
                started.append(subprocess.Popen(command, stdout=out, env={**os.environ, **ONE_THREAD}))
        yield read
    finally:
        for each in started:
            each.terminate()
            each.wait(10)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
