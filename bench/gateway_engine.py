"""A trivial engine for `bench/gateway.py`: answers as SGLang and vLLM do, with words that cost it nothing.

Run as `python bench/gateway_engine.py PORT MODE` with a mode of prefill, decode. A stream has as many chunks as `max_tokens` says, one every `EVERY_S`, each
written by itself, as engines write one for each of their steps.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final, cast

import httptools
import msgspec
import uvloop

MODEL: Final = "echo"
EVERY_S: Final = 0.02
GAUGE: Final = 15_425
"""The token " gauge" of the bundled model."""
TOKENS: Final = 6
"""Of every prompt, as the answers' usage has it."""
_JSON: Final = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
_STREAM: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_WORD: Final = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1796000000,"model":"echo","choices":[{"index":0,"delta":'
    b'{"content":" gauge"},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
)
_LAST: Final = _WORD.replace(b'"finish_reason":null', b'"finish_reason":"length"').replace(
    b'{"content":" gauge"}', b"{}"
)
_TEXT: Final = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1796000000,"model":"echo","choices":[{"index":0,"text":" gauge",'
    b'"logprobs":null,"finish_reason":null,"token_ids":[15425]}],"usage":null}\n\n'
)
_TEXT_LAST: Final = _TEXT.replace(b'"finish_reason":null', b'"finish_reason":"length"')


class Sampling(msgspec.Struct, frozen=True):
    """Of `/generate`."""

    max_new_tokens: int = 1


class Asked(msgspec.Struct):
    """What is read of a request."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    sampling_params: Sampling = Sampling()
    stream_options: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def count(self) -> int:
        """Tokens of the answer."""
        return self.max_completion_tokens or self.max_tokens or self.sampling_params.max_new_tokens


class _Engine(asyncio.Protocol):
    """One connection."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._body = bytearray()
        self._path = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path, body = self._path.partition(b"?")[0], bytes(self._body)
        self._path, self._body = b"", bytearray()
        if body and path in (b"/generate", b"/v1/chat/completions", b"/v1/completions"):
            self._answer(path, msgspec.json.decode(body, type=Asked))
        elif path == b"/v1/models":
            self._whole(b'{"object":"list","data":[{"id":"echo","object":"model","max_model_len":8192}]}')
        else:
            told = {
                "served_model_name": MODEL,
                "disaggregation_mode": self._mode,
                "model_path": MODEL,
                "status": "ready",
                "version": "0.5.23",
            }
            self._whole(msgspec.json.encode(told))

    def _answer(self, path: bytes, asked: Asked) -> None:
        if asked.stream:
            self._transport.write(_STREAM)
            asyncio.get_running_loop().call_later(EVERY_S, self._step, path, asked, 1)
        elif path == b"/generate":
            self._whole(self._generated(asked.count, asked.count))
        else:
            message = {
                "index": 0,
                "message": {"role": "assistant", "content": " gauge" * asked.count},
                "finish_reason": "length",
                "logprobs": None,
            }
            if path == b"/v1/completions":
                message = {"index": 0, "text": " gauge" * asked.count, "token_ids": [GAUGE] * asked.count, "finish_reason": "length", "logprobs": None}
            whole = {
                "id": "chatcmpl-1", "object": "chat.completion", "created": 1_796_000_000, "model": MODEL, "choices": [message],
                "usage": self._usage(asked.count), "kv_transfer_params": asked.kv_transfer_params and {
                    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [1, 2], "remote_engine_id": "e",
                    "remote_host": "127.0.0.1", "remote_port": 1, "tp_size": 1,
                },
            }  # fmt: skip
            self._whole(msgspec.json.encode(whole))

    def _step(self, path: bytes, asked: Asked, number: int) -> None:
        if self._transport.is_closing():
            return
        last = number >= asked.count
        if path == b"/generate":
            event = b"data: " + self._generated(1, number, finish=last) + b"\n\n"
        elif path == b"/v1/completions":
            event = _TEXT_LAST if last else _TEXT
        else:
            event = _LAST if last else _WORD
        if last:
            if path != b"/generate" and asked.stream_options:
                usage = {
                    "id": "chatcmpl-1",
                    "object": "chat.completion.chunk",
                    "created": 1,
                    "model": MODEL,
                    "choices": [],
                    "usage": self._usage(number),
                }
                event += b"data: " + msgspec.json.encode(usage) + b"\n\n"
            event += b"data: [DONE]\n\n"
        self._transport.write(b"%x\r\n%s\r\n" % (len(event), event) + (b"0\r\n\r\n" if last else b""))
        if not last:
            asyncio.get_running_loop().call_later(EVERY_S, self._step, path, asked, number + 1)

    def _generated(self, new: int, total: int, *, finish: bool = True) -> bytes:
        end = {"type": "length", "length": total} if finish else None
        meta = {
            "id": "r",
            "finish_reason": end,
            "prompt_tokens": TOKENS,
            "completion_tokens": total,
            "cached_tokens": 0,
        }
        return msgspec.json.encode({"text": " gauge", "output_ids": [GAUGE] * new, "meta_info": meta})

    def _usage(self, count: int) -> dict[str, Any]:
        return {
            "prompt_tokens": TOKENS,
            "completion_tokens": count,
            "total_tokens": TOKENS + count,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def _whole(self, body: bytes) -> None:
        self._transport.write(b"HTTP/1.1 200 OK\r\n" + _JSON % (len(body), body))


async def main(port: int, mode: str) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: _Engine(mode), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2]))
