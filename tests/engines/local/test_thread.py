"""The engine's thread: what becomes of requests when it ends by itself."""

import asyncio

import pytest

from regauge.engines.local.model import LocalModel
from regauge.engines.local.thread import EngineThread
from regauge.errors import EngineError

from .conftest import Rig, prompt


@pytest.mark.anyio
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_nobody_waits_for_a_thread_that_has_ended(tiny: LocalModel) -> None:
    rig = Rig(tiny)
    engine = EngineThread(rig.scheduler)
    request = rig.request("a", prompt(10))
    async with asyncio.timeout(20):
        with pytest.raises(EngineError, match="the engine ended: division by zero"):
            await engine._do(lambda: 1 / 0)  # as a defect in the scheduler would
        with pytest.raises(EngineError, match="the engine ended"):
            await engine.add(request, lambda _: None)
        assert engine.running == 0
        await engine.abort("a")
    engine.stop()
    with pytest.raises(EngineError):
        engine.failed.result()
