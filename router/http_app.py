"""The HTTP application: paths, and for each what is read, asked of the ingress and sent back.

    /v1/chat/completions /v1/completions /v1/models /tokenize /detokenize     clients
    /openapi.json                                                             this API, described
    /health (this process lives)  /ready (the cluster can serve)              probes
    /metrics /cluster                                                         operators, unless switched off here

Everything that is not a stream is one JSON reply; every error is the OpenAI error object. Holds no state of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tailrace.model.errors import ClientError
from tailrace.router.api_errors import RequestFailed, error_body, reply_to
from tailrace.router.api_types import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    SamplingBody,
    TokenizeBody,
    parse_body,
)
from tailrace.router.chat import ChatFormat
from tailrace.router.chat_tools import ToolChatFormat
from tailrace.router.completions import CompletionFormat
from tailrace.router.cors import cors
from tailrace.router.formats import EventWriter, Format, Reply, error_event
from tailrace.router.http_exchange import ClientGone, Head, Keys, read_body, send_bytes, send_json
from tailrace.router.ingress import Ask, Caller, Generation, IngressService
from tailrace.router.openapi import describe
from tailrace.router.output_form import OutputForm
from tailrace.router.output_types import Tool
from tailrace.router.receipt import HEADER, comment, receipt
from tailrace.router.sampling import check_before_tokenizing, check_ids, sampling_params, wanted_logprobs
from tailrace.router.sse import CLOSE_AFTER, EventStream, Headers, Receive, Send, until_gone
from tailrace.router.stop_strings import StopStrings
from tailrace.router.tokenization import ChatPrompt, IdsPrompt, Prompt, PromptSource, TextPrompt

log = logging.getLogger(__name__)

PARSE_INLINE_BYTES = 65_536  # larger bodies are parsed in a thread
ANY_LENGTH = 2**31


class Exchange:
    """A reply that is worked out while it is sent: Starlette calls it like any ASGI response."""

    def __init__(self, service: IngressService, keys: Keys) -> None:
        self.service, self.keys = service, keys
        self.head = Head([])
        self.headers: Headers = []

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self.arrived = self.service.clock()
        self.head = Head(scope["headers"])
        if self.service.config.request_id_header:
            self.headers = [(b"x-request-id", self.head.request_id.encode())]
        try:
            await self.answer(scope, receive, send)
        except (ClientError, RequestFailed) as error:
            if isinstance(error, ClientError):
                self.service.count_refused("invalid")
            reply = reply_to(error)
            await send_json(send, reply.status, reply.body, self.headers, extra=reply.headers)
        except ClientGone:
            return

    async def answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Reply, or raise ClientError or RequestFailed before anything was sent."""
        raise NotImplementedError

    async def body(self, receive: Receive) -> bytes:
        return await read_body(self.head, receive, self.service.config.max_body_bytes)

    async def parsed(self, kind: type[Any], data: bytes) -> Any:
        """The body as `kind`, checked off the event loop if it is long."""
        if len(data) <= PARSE_INLINE_BYTES:
            return parse_body(kind, data)
        return await self.service.tokenization.run(lambda: parse_body(kind, data), len(data))

    def check_model(self, name: str | None) -> None:
        served = self.service.config.model_name
        if name is not None and name != served:
            message = f"model {name[:80]!r} is not served here; {served!r} is"
            raise ClientError(message, param="model", status=404, code="model_not_found")


class Completion(Exchange):
    """What chat and text completions share: check, tokenize, open, and reply in one piece or as a stream."""

    kind: type[SamplingBody]
    id_prefix: str
    form = OutputForm()  # of the body, once it is read
    close_after: Callable[[], None] | None = None  # as the server gives it

    async def answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        tenant = self.head.tenant(self.keys)
        self.close_after = scope.get("state", {}).get(CLOSE_AFTER)
        data = await self.body(receive)
        body: SamplingBody = await self.parsed(self.kind, data)
        self.check_model(body.model)
        check_before_tokenizing(body, self.service.limits)
        self.form = await self.service.forms.of(body, len(data))
        sources = self.sources(body)
        with self.service.slots(len(sources)):
            await until_gone(self._serve(body, sources, tenant, send), receive)

    def sources(self, body: Any) -> list[PromptSource]:
        raise NotImplementedError

    def format(self, body: Any, reply: Reply, prompts: list[Prompt]) -> Format:
        raise NotImplementedError

    async def _serve(self, body: SamplingBody, sources: list[PromptSource], tenant: str, send: Send) -> None:
        caller = Caller(
            arrived=self.arrived,
            tenant=tenant,
            priority=body.priority,
            conversation=body.conversation_id or self.head.conversation(),
            deadline=None if body.timeout_s is None else self.arrived + body.timeout_s,
        )
        limits = self.service.limits
        prompts = await self._prompts(sources, tenant, body.cache_salt)
        stops = StopStrings(body.stop) if body.stop else None
        asks = [
            Ask(prompt, sampling_params(body, len(prompt.ids), limits, source.param, self.form.grammar), body.n, stops)
            for prompt, source in zip(prompts, sources, strict=True)
        ]
        reply = Reply(
            id=self.id_prefix + self.service.new_id(),
            model=self.service.config.model_name,
            created=int(time.time()),
            samples=body.n,
            with_logprobs=wanted_logprobs(body)[0] is not None,
            with_token_ids=body.return_token_ids,
            with_usage=body.stream_options.include_usage,
        )
        form = self.format(body, reply, prompts)
        wants_receipt = body.receipt or self.head.wants_receipt
        generation = self.service.open(asks, caller)
        try:
            if body.stream:
                await self._stream(generation, EventWriter(reply, form), send, wants_receipt)
            else:
                await generation.done()
                headers = self.headers
                if wants_receipt:
                    headers = [*headers, (HEADER, receipt(generation.flows, self.arrived).encode())]
                await send_json(send, 200, form.whole(generation.flows), headers)
        except asyncio.CancelledError:
            generation.close("client")
            raise
        finally:
            generation.close("sibling_failed")

    async def _prompts(self, sources: list[PromptSource], tenant: str, cache_salt: str) -> list[Prompt]:
        limit, alone = self.service.limits.max_request_tokens, len(sources) == 1
        found = [
            self.service.tokenization.prompt(source, limit=limit, tenant=tenant, cache_salt=cache_salt, alone=alone)
            for source in sources
        ]
        return [await found[0]] if alone else await asyncio.gather(*found)

    async def _stream(self, generation: Generation, writer: EventWriter, send: Send, wants_receipt: bool) -> None:
        config, service = self.service.config, self.service
        out = EventStream(
            send, self.headers, clock=service.clock, slow_reader_s=config.slow_reader_s, comment_s=config.comment_s,
            close_after=self.close_after,
        )  # fmt: skip
        await self._before_headers(generation)
        service.watchers.add(out.watch)
        try:
            await out.start(generation.wake)
            ending = (lambda: comment(generation.flows, self.arrived)) if wants_receipt else str
            await _write_events(generation, writer, out, ending)
        except asyncio.CancelledError:
            if not out.too_slow:
                raise
            out.let_go()
            generation.close("slow_reader")
        finally:
            service.watchers.discard(out.watch)

    async def _before_headers(self, generation: Generation) -> None:
        """Wait for something to send, so that a failure before it still has a status of its own.

        The ingress's ticks say that it has been long: a timer of its own is a fiftieth of what a request costs.
        """
        clock, watchers = self.service.clock, self.service.watchers
        end = clock() + self.service.config.header_wait_s

        def wake_late(now: float) -> None:
            if now >= end:
                generation.wake()

        watchers.add(wake_late)
        try:
            while not generation.has_output and generation.failure is None and clock() < end:
                await generation.changed()
        finally:
            watchers.discard(wake_late)
        if generation.failure is not None:
            raise RequestFailed(generation.failure)


async def _write_events(
    generation: Generation, writer: EventWriter, out: EventStream, ending: Callable[[], str]
) -> None:
    """Everything that comes, to the end. `ending`: what is put before the last event."""
    while True:
        text = writer.pending(generation.flows)
        failure = generation.failure
        if failure is not None:
            await out.end((text + ending() + error_event(failure)).encode(), close=True)
            return
        if generation.ended:
            await out.end((text + writer.end(generation.flows, ending())).encode())
            return
        if text:
            await out.write(text.encode())
        else:
            await out.write_comment_if_due()
            await generation.changed()


class Chat(Completion):
    kind = ChatBody
    id_prefix = "chatcmpl-"

    def sources(self, body: ChatBody) -> list[PromptSource]:
        # No plan: nothing shall be called, and the model is told of no tools.
        tools = () if self.form.plan is None else self.form.plan.tools
        return [chat_prompt(self.service, body.messages, tools, body.add_generation_prompt)]

    def format(self, body: ChatBody, reply: Reply, prompts: list[Prompt]) -> Format:
        if self.form.plan is None:
            return ChatFormat(reply, self.service.table)
        return ToolChatFormat(reply, self.service.table, self.service.forms.tools, self.form.plan)


class TextCompletion(Completion):
    kind = CompletionBody
    id_prefix = "cmpl-"

    def sources(self, body: CompletionBody) -> list[PromptSource]:
        one = len(body.prompt) == 1
        return [
            TextPrompt(prompt, _param(i, one), echo=body.echo)
            if isinstance(prompt, str)
            else IdsPrompt(prompt, _param(i, one), echo=body.echo)
            for i, prompt in enumerate(body.prompt)
        ]

    def format(self, body: CompletionBody, reply: Reply, prompts: list[Prompt]) -> Format:
        return CompletionFormat(reply, self.service.table, [prompt.echo for prompt in prompts])


def chat_prompt(
    service: IngressService, messages: Sequence[Message], tools: Sequence[Tool], add_generation_prompt: bool
) -> ChatPrompt:
    """The conversation, and the tools that its model is told of, as the template takes them."""
    told = tuple(tool.for_template() for tool in tools)
    support = service.forms.tools
    plain = support.messages([message.for_template() for message in messages], told)
    return ChatPrompt(plain, add_generation_prompt, tools=told if support.template_knows else ())


def _param(index: int, one: bool) -> str:
    return "prompt" if one else f"prompt[{index}]"


class Tokenize(Exchange):
    async def answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self.head.tenant(self.keys)
        body: TokenizeBody = await self.parsed(TokenizeBody, await self.body(receive))
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ClientError("prompt: either it or messages is needed", param="prompt")
        if body.messages is not None:
            source: PromptSource = chat_prompt(self.service, body.messages, body.tools, body.add_generation_prompt)
        else:
            source = TextPrompt(body.prompt or "", special=body.add_special_tokens)
        ids = await self.service.tokenization.ids(source, limit=ANY_LENGTH)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self.service.limits.max_request_tokens,
            "tokens": list(ids),
        }
        if body.return_token_strs:
            answer["token_strs"] = [self.service.table.label(token) for token in ids]
        await send_json(send, 200, answer, self.headers)


class Detokenize(Exchange):
    async def answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self.head.tenant(self.keys)
        body: DetokenizeBody = await self.parsed(DetokenizeBody, await self.body(receive))
        self.check_model(body.model)
        check_ids(body.tokens, self.service.config.vocab_size, "tokens")
        table = self.service.table
        text = b"".join(table.literal(token) for token in body.tokens).decode(errors="replace")
        await send_json(send, 200, {"prompt": text}, self.headers)


class Models(Exchange):
    async def answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self.head.tenant(self.keys)
        config = self.service.config
        model = {
            "id": config.model_name,
            "object": "model",
            "created": self.service.created,
            "owned_by": "tailrace",
            "max_model_len": self.service.limits.max_request_tokens,
        }
        asked = scope.get("path_params", {}).get("model")
        if asked is None:
            await send_json(send, 200, {"object": "list", "data": [model]}, self.headers)
            return
        self.check_model(asked)
        await send_json(send, 200, model, self.headers)


class OpenApi(Exchange):
    async def answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        config = self.service.config
        document = describe(config.model_name, keys=bool(config.api_keys), operators=config.public_metrics)
        await send_json(send, 200, document, self.headers)


class Health(Exchange):
    """This process answers: nothing more. What the cluster can do is /ready."""

    async def answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        await send_json(send, 200, {"status": "ok"}, self.headers)


class Ready(Exchange):
    async def answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        text = await self.service.query("ready")
        told: dict[str, Any] = {"status": "unready", "reasons": ["no router"]} if text is None else json.loads(text)
        status = 200 if told.get("status") in ("ready", "degraded") else 503
        await send_json(send, status, told, self.headers)


class Operators(Exchange):
    """/metrics and /cluster, as the router has them."""

    async def answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if not self.service.config.public_metrics:
            raise ClientError("not found", status=404, code="not_found")
        metrics = scope["path"].endswith("/metrics")
        text = await self.service.query("metrics" if metrics else "cluster")
        if text is None:
            await send_json(send, 503, error_body(503, "no router is reachable", code="no_router"), self.headers)
            return
        kind = "text/plain; version=0.0.4; charset=utf-8" if metrics else "application/json"
        await send_bytes(send, 200, text.encode(), kind, self.headers)


class _Endpoint:
    """One path as an ASGI application: around a function Starlette puts a request and another layer of handlers."""

    def __init__(self, exchange: Callable[[], Exchange], method: str) -> None:
        self._exchange = exchange
        self._allowed = "POST, OPTIONS" if method == "POST" else "GET, HEAD, OPTIONS"

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["method"] == "OPTIONS":
            await Response(status_code=204, headers={"allow": self._allowed})(scope, receive, send)
        else:
            await self._exchange()(scope, receive, send)


_LOADED: dict[str, type[Exchange]] = {"/v1/chat/completions": Chat, "/v1/completions": TextCompletion}


class _Direct:
    """Sends what carries the load straight to its endpoint, past Starlette's routing and its handlers of HTTP errors,
    which these endpoints do not raise: together a twentieth of what a request costs. All else goes the usual way.

    Args:
        posts: endpoint of each path that is posted to.
    """

    def __init__(self, app: ASGIApp, posts: Mapping[str, ASGIApp]) -> None:
        self._app, self._posts = app, posts

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        direct = scope["type"] == "http" and scope["method"] == "POST"
        app = self._posts.get(scope["path"], self._app) if direct else self._app
        await app(scope, receive, send)


def build_app(service: IngressService) -> Starlette:
    """The application; its lifespan starts and closes the service."""
    keys = Keys(service.config.api_keys)

    def endpoint(kind: type[Exchange], method: str) -> _Endpoint:
        return _Endpoint(lambda: kind(service, keys), method)

    def route(path: str, kind: type[Exchange], method: str = "GET") -> Route:
        return Route(path, endpoint(kind, method), methods=[method, "OPTIONS"])

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    routes = [
        *(route(path, kind, "POST") for path, kind in _LOADED.items()),
        route("/v1/models", Models),
        route("/v1/models/{model:path}", Models),
        route("/tokenize", Tokenize, "POST"),
        route("/detokenize", Detokenize, "POST"),
        route("/openapi.json", OpenApi),
        route("/health", Health),
        route("/ready", Ready),
        route("/metrics", Operators),
        route("/cluster", Operators),
    ]
    handlers = {HTTPException: _http_error, Exception: _broken}
    posts = {path: endpoint(kind, "POST") for path, kind in _LOADED.items()}
    app = Starlette(
        routes=routes, lifespan=lifespan, exception_handlers=handlers,
        middleware=[*cors(service.config.cors_origins), Middleware(_Direct, posts)],
    )  # fmt: skip
    app.router.redirect_slashes = False  # a path is a path: /v1/models/ is no address of the API
    app.state.request_ids = service.config.request_id_header
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown path or method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method[:20]} {request.url.path[:200]}: {error.detail}"
    headers = {**(error.headers or {}), **_id_headers(request)}
    return JSONResponse(error_body(error.status_code, message), error.status_code, headers=headers)


async def _broken(request: Request, error: Exception) -> Response:
    """A bug of ours; Starlette raises the error again after this reply, so it is logged with its traceback."""
    body = error_body(500, "an internal error ended the request", code="internal")
    return JSONResponse(body, 500, headers=_id_headers(request))


def _id_headers(request: Request) -> dict[str, str]:
    if not request.app.state.request_ids:
        return {}
    return {"x-request-id": Head(request.scope["headers"]).request_id}
