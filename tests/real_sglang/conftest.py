"""The last line of `make test-sglang` says what ran."""

from __future__ import annotations

import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest


def pytest_unconfigure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or config.option.collectonly:
        return
    how = ("passed", "failed", "error", "skipped")
    files = Counter(Path(r.nodeid.split("::")[0]).name for kind in how for r in reporter.stats.get(kind, ()))
    told = ", ".join(f"{len(reporter.stats.get(kind, ()))} {kind}" for kind in how if reporter.stats.get(kind))
    ran = ", ".join(f"{name} {count}" for name, count in sorted(files.items()))
    sys.stdout.write(
        f"ran: SGLang {version('sglang')} on the CPU, sglang-router {version('sglang-router')}; {ran or 'nothing'}: {told}\n"
    )
