from collections.abc import Iterator

import pytest
from contract import Rig


@pytest.fixture(params=["shm", "tcp"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    with made.stack:
        yield made
