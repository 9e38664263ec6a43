from collections.abc import Iterator

import pytest
from contract import Rig


@pytest.fixture(params=["shm", "tcp", "tls", "careless"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    with made.stack:
        yield made


@pytest.fixture
def kind() -> str:
    """The transport over a library whose processes are killed and frozen."""
    return "careless"
