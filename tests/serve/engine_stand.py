"""A stand-in for a server of vLLM or SGLang: the four routes that clients' bodies are passed on to, and what a gateway asks besides."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from serve_rig import MODEL, TOKEN, WAIT_S

from regauge.serve.passthrough import ROUTES


def usage(cached: int, prompt: int = 9) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": cached}}


class Engine:
    """Answers every route with what it is given; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answer: Any = {"id": "x", "choices": [{"text": "a b"}], "usage": usage(8)}
        self.stream: list[bytes] = []
        self.status = 200
        self.more: dict[str, str] = {}
        self.gate: asyncio.Event | None = None
        """What it waits for before the first byte of its body."""
        self.breaks = False
        """It dies at its stream's end, or instead of answering."""
        self.hangs = False
        """It does not end its stream."""
        self.began, self.gone = asyncio.Event(), asyncio.Event()
        self.aborts: asyncio.Queue[str] = asyncio.Queue()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        body = await request.json()
        self.asked.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        try:
            return await self._serve(request, body.get("stream") is True)
        except (asyncio.CancelledError, ConnectionResetError):
            self.gone.set()
            raise

    async def _serve(self, request: web.Request, stream: bool) -> web.StreamResponse:
        if not stream or self.status != 200:
            await self._wait()
            if self.breaks:
                assert request.transport is not None
                request.transport.abort()
            return web.json_response(self.answer, status=self.status, headers=self.more)
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8", **self.more})
        await response.prepare(request)
        self.began.set()
        await self._wait()
        for part in self.stream:
            await response.write(part)
        if self.breaks:
            assert request.transport is not None
            request.transport.abort()
        if self.hangs:
            await asyncio.sleep(WAIT_S)
        return response

    async def _wait(self) -> None:
        if self.gate is not None:
            await self.gate.wait()

    async def abort(self, request: web.Request) -> web.Response:
        self.aborts.put_nowait((await request.json())["rid"])
        return web.Response()

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    def routes(self) -> list[web.RouteDef]:
        posts = [web.post(path, self.serve) for path in (*ROUTES, "/v1/messages/count_tokens")]
        return [
            *posts, web.post("/abort_request", self.abort), web.get("/health", self.health), web.get("/v1/models", self.models),
        ]  # fmt: skip
