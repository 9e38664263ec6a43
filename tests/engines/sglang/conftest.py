"""Without SGLang its pools cannot be tested: the run says so, and how to change it."""

from __future__ import annotations

import importlib.util

import pytest

_SPEC = importlib.util.find_spec("sglang")
SGLANG = _SPEC is not None and _SPEC.origin is not None  # this folder is called so, too: a namespace, without an origin
collect_ignore = [] if SGLANG else ["test_pools.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not SGLANG:
        terminalreporter.write_line(
            "NOT RUN: tests/engines/sglang/test_pools.py, since SGLang is not installed here: `make test-sglang` installs it apart, and runs it"
        )
