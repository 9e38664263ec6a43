"""Without an engine nothing can be held to its interface: the run says so, and how to change it."""

from __future__ import annotations

import importlib.util
from typing import Final

import pytest

NEED: Final = {"vllm": ("test_contract.py",), "sglang": ("test_pools.py", "test_sglang_contract.py")}
"""Engine -> the files of its folder that import it."""


def _missing(engine: str) -> bool:
    spec = importlib.util.find_spec(engine)
    return spec is None or spec.origin is None  # folders here are called so, too: namespaces, without an origin


MISSING: Final = {engine: files for engine, files in NEED.items() if _missing(engine)}
collect_ignore = [f"{engine}/{file}" for engine, files in MISSING.items() for file in files]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for engine, files in MISSING.items():
        terminalreporter.write_line(
            f"NOT RUN: {', '.join(files)} of tests/engines/{engine}, since {engine} is not installed here: `make test-{engine}` installs it apart, and runs it"
        )
