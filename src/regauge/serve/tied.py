"""Processes that end with the one that started them: `python -m regauge.serve.tied PROGRAM ARGUMENT...` becomes such a program."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2); kept by execve


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the supervisor dies, so that nothing is left running."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """Become the program that the arguments name; return only if there is none."""
    if not arguments:
        sys.stderr.write("usage: python -m regauge.serve.tied PROGRAM ARGUMENT...\n")
        return 2
    die_with_parent()
    try:
        os.execvp(arguments[0], arguments)  # noqa: S606  # what the supervisor says
    except OSError as error:
        sys.stderr.write(f"{arguments[0]}: {error.strerror}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
