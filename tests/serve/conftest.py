"""Fixtures of the gateway's tests; what they are made of is in `serve_rig.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from deployment import Served, deployment
from serve_rig import TEMPLATE, Rig, open_rig, train

from regauge.serve.text import Tokenizer


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(train(), template=TEMPLATE, max_context=512)


@pytest.fixture(scope="module")
async def rig(tokenizer: Tokenizer, anyio_backend: str) -> AsyncIterator[Rig]:
    """One rig for all tests of a module that leave its switches alone."""
    async with open_rig(tokenizer) as opened:
        yield opened


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One deployment for all tests that ask for real processes; each must leave it able to serve."""
    with deployment(tmp_path_factory.mktemp("serve")) as found:
        yield found
