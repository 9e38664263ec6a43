"""Says at the end what each pair came to."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each pair, and the last for all of them."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    told = [
        (name, value)
        for report in reports
        if isinstance(report, pytest.TestReport)
        for name, value in report.user_properties
    ]
    for _, line in sorted(told):
        terminalreporter.write_line(str(line))
    pairs = sum(name == "pair" for name, _ in told)
    failed = len(terminalreporter.getreports("failed"))
    terminalreporter.write_line(
        f"mixed engines: {pairs} pairs compared with their prefill engine alone, {failed} failed"
    )
