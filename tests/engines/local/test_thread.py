"""The engine's thread: what becomes of requests when it ends by itself, and who waits for a step."""

import asyncio
import threading

import pytest

from regauge.engines.local.model import LocalModel
from regauge.engines.local.scheduler import Output
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


@pytest.mark.anyio
async def test_only_a_request_that_goes_on_is_waited_for(tiny: LocalModel) -> None:
    """While a step is under way, one that has ended is over at once; one that is in the step is not, however often it is aborted."""
    rig = Rig(tiny)
    engine = EngineThread(rig.scheduler)
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    begun, go_on = threading.Event(), threading.Event()
    forward = tiny.forward

    def held(*given: object) -> object:
        begun.set()
        assert go_on.wait(20)
        return forward(*given)

    async with asyncio.timeout(60):
        await engine.add(rig.request("over", prompt(10), prefill_only=True), outputs.put_nowait)
        assert (await outputs.get()).finish_reason == "prefill"
        tiny.forward = held
        try:
            await engine.add(rig.request("goes on", prompt(12)), outputs.put_nowait)
            await asyncio.to_thread(begun.wait, 20)
            await engine.abort("over")
            await engine.abort("never there")
            first, second = (asyncio.create_task(engine.abort("goes on")) for _ in range(2))
            done, _ = await asyncio.wait([first, second], timeout=0.1)
            assert not done
        finally:
            go_on.set()
            del tiny.forward
        await asyncio.gather(first, second)
        assert not rig.scheduler.has_work
    engine.stop()
