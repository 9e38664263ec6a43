"""Runs a scheduler in a thread of its own, for an event loop.

Outputs and layer marks are handed to the loop in order. An abort is done when no step touches the request's pages any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from regauge.engines.local.scheduler import Output, Request, Scheduler
from regauge.engines.local.speed import Speed, Work
from regauge.errors import EngineError

log = structlog.get_logger()

OnOutput = Callable[[Output], None]
OnLayers = Callable[[int, int, int], None]
"""Called with (layer, start, count): these tokens of the prompt have been written for that layer."""


@dataclass(frozen=True)
class _Callbacks:
    output: OnOutput
    layers: OnLayers | None


class EngineThread:
    """Owns the scheduler. All methods are for the event loop's thread, and callbacks run there."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._callbacks: dict[str, _Callbacks] = {}
        self._aborting: set[str] = set()
        self._began: dict[str, float] = {}
        """Of requests whose prompt is computed here: when the step began that took it up."""
        self._step_began = 0.0
        self._layer = (-1, 0.0, 0.0)
        """Of the step under way: the layer computed last, when it was begun and when it was ready. For the thread."""
        self.took = (0.0, 0.0)
        """When what is being told was begun, and when it was ready, by CLOCK_MONOTONIC: a layer, or a step. For callbacks."""
        self.speed = Speed()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Raises what ended the thread, if anything does."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Requests that the engine knows."""
        return len(self._callbacks)

    def taken_up(self, request_id: str) -> float | None:
        """Return when the step began that first computed something of a request's prompt, by CLOCK_MONOTONIC, until `abort`; None: none has."""
        return self._began.get(request_id)

    async def add(self, request: Request, on_output: OnOutput, on_layers: OnLayers | None = None) -> None:
        """Start a request. Raises EngineError that says why it is refused."""
        self._callbacks[request.id] = _Callbacks(on_output, on_layers)
        try:
            await self._do(lambda: self._scheduler.add(request))
        except EngineError:
            del self._callbacks[request.id]
            raise

    async def abort(self, request_id: str) -> None:
        """End a request; when this returns, the engine does not touch its pages any more. Unknown ones are over, and not waited for."""
        self._began.pop(request_id, None)
        if self._callbacks.pop(request_id, None) is None and request_id not in self._aborting:
            return  # so is the step that it ended with
        self._aborting.add(request_id)
        try:
            with contextlib.suppress(EngineError):  # a thread that has ended touches nothing
                await self._do(lambda: self._scheduler.abort(request_id))
        finally:
            self._aborting.discard(request_id)

    def stop(self) -> None:
        """End the thread after the step it is in."""
        self._commands.put(None)
        self._thread.join()

    async def _do(self, work: Callable[[], object]) -> None:
        done: asyncio.Future[None] = self._loop.create_future()

        def command() -> None:
            try:
                work()
            except EngineError as error:
                self._loop.call_soon_threadsafe(_fail, done, error)
            else:
                self._loop.call_soon_threadsafe(_settle, done)

        self._commands.put(command)
        await asyncio.wait([done, self.failed], return_when=asyncio.FIRST_COMPLETED)
        (done if done.done() else self.failed).result()

    def _run(self) -> None:
        try:
            while self._obey():
                if self._scheduler.has_work:
                    begun = self._step_began = time.monotonic()
                    self._layer = (-1, begun, begun)
                    outputs = self._scheduler.step(self._on_layer)
                    took = begun, time.monotonic()
                    self._loop.call_soon_threadsafe(self._deliver, outputs, self._scheduler.work, took)
        except Exception as error:
            log.exception("the engine's thread ended")
            self._loop.call_soon_threadsafe(_fail, self.failed, EngineError(f"the engine ended: {error}"))
            raise

    def _obey(self) -> bool:
        """Carry out what has been asked for; wait for something if there is nothing to compute."""
        while True:
            try:
                command = self._commands.get(block=not self._scheduler.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _on_layer(self, request_id: str, layer: int, start: int, count: int) -> None:
        last, begun, ready = self._layer
        if layer != last:
            begun, ready = ready, time.monotonic()
            self._layer = (layer, begun, ready)
        self._loop.call_soon_threadsafe(self._mark, self._step_began, (begun, ready), request_id, layer, start, count)

    def _mark(
        self, began: float, took: tuple[float, float], request_id: str, layer: int, start: int, count: int
    ) -> None:
        callbacks = self._callbacks.get(request_id)
        if callbacks is not None:
            self._began.setdefault(request_id, began)
        self.took = took
        if callbacks is not None and callbacks.layers is not None:
            callbacks.layers(layer, start, count)

    def _deliver(self, outputs: list[Output], work: Work, took: tuple[float, float]) -> None:
        self.speed.add(work, took[1] - took[0])
        self.took = took
        for output in outputs:
            callbacks = self._callbacks.get(output.request_id)
            if output.finish_reason is not None:
                self._callbacks.pop(output.request_id, None)
            if callbacks is not None:
                callbacks.output(output)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: asyncio.Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
