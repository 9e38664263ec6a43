"""The gateway's endpoints: from a checked request to a job on the workers."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from regauge.config import LimitsConfig, ServeConfig
from regauge.serve import anthropic, passthrough, tracecontext
from regauge.serve.answer import JSON, SLOW_READER_S, Answer, House
from regauge.serve.cards import ModelCard, ModelList
from regauge.serve.choice import Choice
from regauge.serve.dialects import writer_for
from regauge.serve.failures import unavailable
from regauge.serve.front import Asking, Endpoint
from regauge.serve.openai import (
    COMPLETION_MAX_TOKENS,
    SERVER_ERROR,
    ApiError,
    Ask,
    Messages,
    bad,
    parse_chat,
    parse_completion,
)
from regauge.serve.passing import PassAnswer, PassJob, Sender
from regauge.serve.recent import Story
from regauge.serve.relay import Job, Service
from regauge.serve.tenants import Tenant, Tenants
from regauge.serve.text import TemplateError

LONG_TEXT: Final = 16_384
"""Characters from which on a request is tokenised in a thread: the event loop must not stand still."""
PIECE: Final = 64
"""Characters that a message or prompt counts for besides its own: what the template writes around it, and each call's cost."""


class Gateway:
    """The endpoints."""

    def __init__(
        self, config: ServeConfig, service: Service, house: House, tenants: Tenants, *, records: bool = False
    ) -> None:
        """`records`: whether spans are exported."""
        self._records = records
        self._limits = config.limits
        self._service = service
        self._house = house
        self._tenants = tenants
        self._tokenizer = service.tokenizer
        self._passing = config.gateway.passthrough == "auto"
        self._isolates = config.gateway.isolate_prefixes
        self._created = int(time.time())
        own = service.tokenizer.max_context
        engines = min(config.prefill.max_context, config.decode.max_context)
        self._context = engines if own is None else min(engines, own)

    def set_limits(self, limits: LimitsConfig) -> None:
        """Put other limits in force, for requests that come from now on."""
        self._limits = limits
        self._house.limit = limits.max_queue

    def routes(self) -> list[Route]:
        """Return the routes; `observe.ROUTES` lists the same for the metrics' labels."""
        return [
            Route("/v1/chat/completions", Endpoint(self.chat), methods=["POST"]),
            Route("/v1/completions", Endpoint(self.complete), methods=["POST"]),
            Route(anthropic.MESSAGES, Endpoint(self.messages), methods=["POST"]),
            Route(anthropic.COUNT, Endpoint(self.count_tokens), methods=["POST"]),
            Route(passthrough.RESPONSES.path, Endpoint(self.responses), methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{id:path}", self.model),
        ]

    async def chat(self, asking: Asking) -> Answer | PassAnswer:
        """`POST /v1/chat/completions`."""
        return await self._either(asking, passthrough.CHAT, parse_chat)

    async def complete(self, asking: Asking) -> Answer | PassAnswer:
        """`POST /v1/completions`."""
        return await self._either(asking, passthrough.COMPLETION, parse_completion)

    async def messages(self, asking: Asking) -> Answer | PassAnswer:
        """`POST /v1/messages`."""
        return await self._either(asking, passthrough.MESSAGES, anthropic.parse_messages)

    async def responses(self, asking: Asking) -> PassAnswer:
        """`POST /v1/responses`: for engines that have it themselves."""
        body = await self._body(asking)
        if not self._passes:
            message = "/v1/responses is passed on to engines that have it: this needs workers that are all vLLM, or all SGLang, and gateway.passthrough auto"
            raise ApiError(501, message, type=SERVER_ERROR, code="not_implemented")
        return self._pass(asking, passthrough.read(passthrough.RESPONSES, body))

    async def count_tokens(self, asking: Asking) -> Response:
        """`POST /v1/messages/count_tokens`."""
        model, messages = anthropic.parse_count(await self._body(asking))
        self._check_model(asking.tenant, model)
        long = sum(len(message["content"]) + PIECE for message in messages) > LONG_TEXT
        ids = await asyncio.to_thread(self._encode_chat, messages) if long else self._encode_chat(messages)
        return _json(anthropic.TokenCount(len(ids)))

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`: those that the tenant may use."""
        tenant: Tenant = request.state.tenant
        return _json(ModelList(data=[self._card()] if tenant.allows(self._service.model) else []))

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{id}`."""
        self._check_model(request.state.tenant, request.path_params["id"])
        return _json(self._card())

    def _card(self) -> ModelCard:
        return ModelCard(id=self._service.model, created=self._created, max_model_len=self._context)

    def _check_model(self, tenant: Tenant, name: str) -> None:
        if name != self._service.model or not tenant.allows(name):
            has = repr(self._service.model) if tenant.allows(self._service.model) else "none for this API key"
            message = f"the model {name!r} does not exist; this server has {has}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _body(self, asking: Asking) -> bytes:
        limit = self._limits.max_body_bytes
        too_large = ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")
        if int(asking.header(b"content-length") or 0) > limit:
            raise too_large
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with nullcontext() if asking.whole else asyncio.timeout(self._limits.request_timeout_s):
                while more:
                    part, more = await asking.read()
                    size += len(part)
                    if size > limit:
                        raise too_large
                    parts.append(part)
        except TimeoutError as error:
            raise ApiError(408, "the body did not arrive in time", code="timeout") from error
        return b"".join(parts)

    @property
    def _passes(self) -> bool:
        return self._passing and self._service.fleet.api is not None

    async def _either(
        self, asking: Asking, route: passthrough.Route, parse: Callable[[bytes], Ask]
    ) -> Answer | PassAnswer:
        """Answer a request here, or pass its body on."""
        body = await self._body(asking)
        # Neither engine takes a salt with the Messages API: what must not be shared is put into tokens here.
        if not self._passes or (route is passthrough.MESSAGES and self._salt(asking.tenant)):
            return await self._answer(asking, parse(body))
        asked = passthrough.read(route, body)
        if asked.alone:  # it takes several prompts' KV caches: here it is several requests, if all of it is known here
            try:
                ask = parse(body)
            except ApiError:
                if self._service.fleet.api != "vllm":
                    raise ApiError(
                        400, f"these engines cannot do it: {asked.alone}", code="unsupported_parameter"
                    ) from None
            else:
                return await self._answer(asking, ask)
        return self._pass(asking, asked)

    def _pass(self, asking: Asking, asked: passthrough.Asked) -> PassAnswer:
        self._check_model(asking.tenant, asked.model)
        self._check_service()
        tenant = asking.tenant
        name = f"{asking.request_id}-{secrets.token_hex(4)}-0"
        sender = Sender(name, tenant.name, tenant.priority, self._headers(asking), self._salt(tenant))
        job = PassJob(asked, sender, self._service, asked.most or self._limits.default_max_tokens)
        asking.scope["state"]["grant"] = self._tenants.take(tenant, job.prompt_tokens + job.max_tokens)
        self._house.enter(job)
        self._service.names.add(asking.request_id, [name])
        self._keep(asking, job.story)
        return PassAnswer(job, asked, self._house, self._limits.request_timeout_s + SLOW_READER_S)

    def _salt(self, tenant: Tenant) -> str:
        """Return what parts this tenant's prompts from others' in prefix caches, so that nobody can find out others' prompts by how soon an answer comes."""
        isolates = not self._tenants.open if self._isolates is None else self._isolates
        return tenant.name if isolates else ""

    def _headers(self, asking: Asking) -> dict[str, str]:
        """Return the headers that go with a request to the workers."""
        return {"X-Request-Id": asking.request_id}

    def _keep(self, asking: Asking, story: Story) -> None:
        """Keep what becomes of a request, before it begins."""
        story.context = tracecontext.begin(tracecontext.of_client(asking.scope["headers"]), records=self._records)
        asking.scope["state"]["story"] = story
        self._service.recent.add(asking.request_id, story)

    async def _answer(self, asking: Asking, ask: Ask) -> Answer:
        self._check_model(asking.tenant, ask.model)
        count = 1 if ask.chat else len(ask.prompts)
        if count * ask.n > self._limits.max_queue:
            raise bad("prompt", f"{count} prompts x n={ask.n} is more than {self._limits.max_queue} requests")
        long = sum(len(piece) + PIECE for piece in _pieces(ask)) > LONG_TEXT
        prompts = await asyncio.to_thread(self._encode, ask) if long else self._encode(ask)
        budgets = [self._budget(ids, ask, index) for index, ids in enumerate(prompts)]
        self._check_service()
        request_id = asking.request_id
        salt = secrets.token_hex(4)  # a client may send the same X-Request-Id twice
        choices = [
            Choice(
                index=prompt * ask.n + nth,
                prompt=prompt,
                request_id=f"{request_id}-{salt}-{prompt * ask.n + nth}",
                token_ids=ids,
                sampling=ask.sampling_for(budgets[prompt], nth),
                stops=ask.stops,
            )
            for prompt, ids in enumerate(prompts)
            for nth in range(ask.n)
        ]
        tenant = asking.tenant
        most = sum(len(choice.token_ids) + choice.sampling.max_tokens for choice in choices)
        asking.scope["state"]["grant"] = self._tenants.take(tenant, most)
        headers = self._headers(asking)
        job = Job(
            choices, self._service, tenant=tenant.name, priority=tenant.priority, salt=self._salt(tenant), headers=headers
        )  # fmt: skip
        writer = writer_for(
            ask,
            tokenizer=self._tokenizer,
            model=self._service.model,
            fingerprint=f"regauge-{self._service.fleet.verdict.path}",
            request_id=request_id,
            prompts=prompts,
        )
        self._house.enter(job)
        self._service.names.add(request_id, [choice.request_id for choice in choices])
        self._keep(asking, job.story)
        return Answer(
            job,
            writer,
            self._house,
            stream=ask.stream,
            limit_s=self._limits.request_timeout_s + SLOW_READER_S,
        )

    def _check_service(self) -> None:
        """Raise ApiError (503) where no request can be served, or none could be billed."""
        if fault := self._service.fleet.fault():
            raise unavailable(fault)
        if self._service.meter is not None and (trouble := self._service.meter.trouble):
            raise unavailable(f"the meter takes nothing: {trouble}", retry_after_s=5)

    def _encode(self, ask: Ask) -> list[list[int]]:
        if ask.chat:
            return [self._encode_chat(ask.messages)]
        size = self._tokenizer.vocab_size
        prompts = []
        for index, prompt in enumerate(ask.prompts):
            if isinstance(prompt, str):
                prompts.append(self._tokenizer.encode(prompt))
            elif all(0 <= token < size for token in prompt):
                prompts.append(prompt)
            else:
                where = "prompt" if len(ask.prompts) == 1 else f"prompt[{index}]"
                raise bad(where, f"token ids go up to {size - 1}")
        return prompts

    def _encode_chat(self, messages: Messages) -> list[int]:
        try:
            return self._tokenizer.encode_chat(messages)
        except TemplateError as error:
            raise bad("messages", str(error)) from error

    def _budget(self, ids: list[int], ask: Ask, prompt: int) -> int:
        """Return the most tokens to generate after a prompt."""
        param = "messages" if ask.chat else "prompt"
        where = param if len(ask.prompts) < 2 else f"prompt[{prompt}]"
        if not ids:
            raise bad(where, "has no tokens")
        room = self._context - len(ids)
        asked = 1 if ask.max_tokens is None else ask.max_tokens
        if asked > room:
            message = (
                f"the context holds {self._context} tokens; {len(ids) + asked} are asked for:"
                f" {len(ids)} in {where} and {asked} for the answer"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        if ask.max_tokens is not None:
            return ask.max_tokens
        usual = self._limits.default_max_tokens if ask.chat else COMPLETION_MAX_TOKENS
        return min(max(usual, ask.sampling.min_tokens), room)


def _pieces(ask: Ask) -> Iterable[str | list[int]]:
    return (message["content"] for message in ask.messages) if ask.chat else ask.prompts


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)
