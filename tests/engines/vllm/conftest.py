"""Without vLLM its contract cannot be tested: the run says so, and how to change it."""

from __future__ import annotations

import importlib.util

import pytest

_SPEC = importlib.util.find_spec("vllm")
VLLM = _SPEC is not None and _SPEC.origin is not None  # this folder is called so, too: a namespace, without an origin
collect_ignore = [] if VLLM else ["test_contract.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not VLLM:
        terminalreporter.write_line(
            "NOT RUN: tests/engines/vllm/test_contract.py, since vLLM is not installed here: `make test-vllm` installs it apart, and runs it"
        )
