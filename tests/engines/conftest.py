"""Without an engine nothing can be held to its interface: the run says so, and how to change it."""

from __future__ import annotations

import importlib.util
from typing import Final

import pytest

NEED: Final = {"vllm": "test_contract.py", "sglang": "test_pools.py"}
"""Engine -> the file of its folder that imports it."""


def _missing(engine: str) -> bool:
    spec = importlib.util.find_spec(engine)
    return spec is None or spec.origin is None  # folders here are called so, too: namespaces, without an origin


MISSING: Final = {engine: file for engine, file in NEED.items() if _missing(engine)}
collect_ignore = [f"{engine}/{file}" for engine, file in MISSING.items()]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for engine, file in MISSING.items():
        terminalreporter.write_line(
            f"NOT RUN: tests/engines/{engine}/{file}, since {engine} is not installed here: `make test-{engine}` installs it apart, and runs it"
        )
