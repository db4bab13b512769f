"""POST /v1/chat/completions: wire form to canonical request, events to a whole answer or to SSE frames.

Read next: `gateway/pipeline.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from litestar import Request, post
from litestar.types import ASGIApp

from gateway.errors import ApiError, out_of_range
from gateway.handlers.common import (
    Gathered,
    Identity,
    Surface,
    begin,
    encode,
    error_frame,
    evidence,
    identity,
    request_id_of,
    surface_of,
    wire_usage,
)
from gateway.handlers.params import canonical_params, decode, refuse_not_served
from gateway.handlers.tools import GatheredCalls, call_id, earlier_calls, tools_of
from gateway.settings import Limits
from gateway.sse import DONE, EventStream, JsonAnswer, frame, unless_gone
from gateway.wire.openai import (
    AssistantMessage,
    CallDelta,
    CallFunctionDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    TokenLogprobWire,
    TopLogprobWire,
    UsageWire,
)
from routers.types import (
    CanonicalRequest,
    Delta,
    Event,
    Finished,
    Message,
    ReasoningDelta,
    RequestUsage,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)

DECODER = msgspec.json.Decoder(ChatRequest)
TEMPLATE_KWARGS = frozenset({"enable_thinking", "thinking", "reasoning_effort", "date_string"})
MAX_TEMPLATE_TEXT = 256


@post("/v1/chat/completions", status_code=200)
async def chat_completions(request: Request[Any, Any, Any]) -> ASGIApp:
    """OpenAI's chat completions, streamed or whole."""
    surface = surface_of(request)
    caller = await surface.pipeline.authenticate(request.headers)
    wire: ChatRequest = decode(DECODER, await request.body())
    canonical = to_canonical(wire, request_id_of(request.headers, surface), surface.limits)
    events = surface.pipeline.run(caller, canonical, request.headers)
    if wire.stream:
        started = await unless_gone(request.receive, begin(events))
        frames = stream_frames(events, wire, identity("chatcmpl", started, canonical, surface), surface.new_id)
        return EventStream(await anext(frames), frames, headers=evidence(started, canonical))
    return await unless_gone(request.receive, whole(events, wire, canonical, surface))


def to_canonical(wire: ChatRequest, new_id: str, limits: Limits) -> CanonicalRequest:
    """Raises ApiError for what is out of range or not served."""
    refuse_not_served(wire)
    if not 1 <= len(wire.messages) <= limits.messages:
        raise out_of_range("messages", f"a list of {len(wire.messages)}", f"1 to {limits.messages} messages")
    if wire.top_logprobs is not None and not wire.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true.", param="top_logprobs", code="invalid_value")
    if wire.top_logprobs is not None and not 0 <= wire.top_logprobs <= limits.top_logprobs:
        raise out_of_range("top_logprobs", wire.top_logprobs, f"0 to {limits.top_logprobs}")
    max_tokens = wire.max_completion_tokens if wire.max_completion_tokens is not None else wire.max_tokens
    logprobs = (wire.top_logprobs or 0) if wire.logprobs else None
    kwargs = template_kwargs(wire.chat_template_kwargs or {})
    if wire.add_generation_prompt is False:
        kwargs["add_generation_prompt"] = False
    return CanonicalRequest(
        request_id=new_id,
        surface="chat",
        model=wire.model,
        messages=tuple(to_message(message, number) for number, message in enumerate(wire.messages)),
        params=canonical_params(wire, limits, max_tokens=max_tokens, logprobs=logprobs),
        stream=bool(wire.stream),
        template_kwargs=kwargs,
        tools=tools_of(wire, limits),
        parallel_tool_calls=wire.parallel_tool_calls is not False,
        priority=wire.priority or 0,
    )


def to_message(message: ChatMessage, number: int) -> Message:
    """Text content only. `developer` is OpenAI's newer name of `system`."""
    where = f"messages[{number}]"
    if message.function_call is not None:
        raise ApiError(
            400,
            f"{where}.function_call is the old form of tool_calls; send tool_calls.",
            param=f"{where}.function_call",
            code="unsupported_parameter",
        )
    return Message(
        role="system" if message.role == "developer" else message.role,
        content=content_text(message, where),
        name=message.name,
        extra=earlier_calls(message, where),
    )


def content_text(message: ChatMessage, where: str) -> str:
    """The text of a message; parts are joined."""
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise ApiError(400, f"{where}.content is null; a {message.role} message needs text.", param=f"{where}.content")
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise ApiError(
                400,
                f"{where}.content[{index}].type is {part.type!r}; this version serves 'text' parts only.",
                param=f"{where}.content[{index}].type",
                code="unsupported_parameter",
            )
    return "".join(part.text or "" for part in content)


def template_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    """Variables a client may hand to the chat template: a short list of names, plain values."""
    for name, value in given.items():
        if name not in TEMPLATE_KWARGS:
            raise out_of_range("chat_template_kwargs", f"{name!r}", ", ".join(sorted(TEMPLATE_KWARGS)))
        if not isinstance(value, bool | str | int) or (isinstance(value, str) and len(value) > MAX_TEMPLATE_TEXT):
            raise out_of_range(f"chat_template_kwargs.{name}", "of another kind", "a boolean, number or short string")
    return dict(given)


async def whole(
    events: AsyncGenerator[Event, None], wire: ChatRequest, canonical: CanonicalRequest, surface: Surface
) -> ASGIApp:
    """Wait for everything and answer once."""
    async with aclosing(events):
        started = await begin(events)
        choices = [GatheredChat(surface.new_id) for _ in range(canonical.params.n)]
        usage: RequestUsage | None = None
        async for event in events:
            if isinstance(event, TextDelta):
                gathered = choices[event.index]
                gathered.text.append(event.text)
                gathered.token_ids += event.token_ids
                gathered.logprobs += wire_logprobs(event.logprobs or ())
            elif isinstance(event, ReasoningDelta):
                choices[event.index].reasoning.append(event.text)
            elif isinstance(event, ToolCallDelta):
                choices[event.index].calls.add(event)
            elif isinstance(event, Finished):
                choices[event.index].finished = event
            elif isinstance(event, RequestUsage):
                usage = event
    assert usage is not None, "a stream without usage"
    made = identity("chatcmpl", started, canonical, surface)
    response = ChatResponse(
        id=made.id,
        created=made.created,
        model=made.model,
        system_fingerprint=made.fingerprint,
        choices=[whole_choice(index, gathered, wire) for index, gathered in enumerate(choices)],
        usage=wire_usage(usage),
    )
    return JsonAnswer(encode(response), headers=evidence(started, canonical))


class GatheredChat(Gathered):
    """The pieces of one choice of a chat."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__()
        self.reasoning: list[str] = []
        self.calls = GatheredCalls(new_id)

    def message(self, *, with_reasoning: bool) -> AssistantMessage:
        """The whole answer."""
        calls, text = self.calls.wire(), "".join(self.text)
        thoughts = "".join(self.reasoning) if with_reasoning and self.reasoning else msgspec.UNSET
        return AssistantMessage(
            content=text if text or not calls else None,
            tool_calls=calls or msgspec.UNSET,
            reasoning=thoughts,
            reasoning_content=thoughts,
        )


def whole_choice(index: int, gathered: GatheredChat, wire: ChatRequest) -> ChatChoice:
    """One choice of a whole answer."""
    assert gathered.finished is not None, f"choice {index} never finished"
    return ChatChoice(
        index=index,
        message=gathered.message(with_reasoning=wire.include_reasoning is not False),
        logprobs=ChatLogprobs(content=gathered.logprobs) if wire.logprobs else None,
        finish_reason=gathered.finished.finish_reason,
        stop_reason=gathered.finished.stop_reason,
        token_ids=gathered.token_ids if wire.return_token_ids else msgspec.UNSET,
    )


async def stream_frames(
    events: AsyncGenerator[Event, None], wire: ChatRequest, made: Identity, new_id: Callable[[], str]
) -> AsyncGenerator[bytes, None]:
    """Role of each choice, its content, its end; usage if asked for; [DONE]. A fault is one error frame."""
    options = wire.stream_options
    with_usage = options is not None and options.include_usage
    usage_before: UsageWire | msgspec.UnsetType | None = None if with_usage else msgspec.UNSET

    def chunk(choices: list[ChatChunkChoice], usage: UsageWire | msgspec.UnsetType | None = usage_before) -> bytes:
        return frame(
            ChatChunk(
                id=made.id,
                created=made.created,
                model=made.model,
                system_fingerprint=made.fingerprint,
                choices=choices,
                usage=usage,
            )
        )

    spoken: set[int] = set()
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, RequestUsage):
                    if with_usage:
                        yield chunk([], wire_usage(event))
                    continue
                assert not isinstance(event, Started), f"unexpected event {event}"
                if not is_wanted(event, wire):
                    continue
                if event.index not in spoken:
                    spoken.add(event.index)
                    yield chunk([ChatChunkChoice(index=event.index, delta=ChatDelta(role="assistant", content=""))])
                yield chunk([stream_choice(event, wire, new_id)])
        yield DONE
    except Exception as error:
        yield error_frame(error, made.request_id)


def is_wanted(event: Delta | Finished, wire: ChatRequest) -> bool:
    """False for thoughts that were declined, and for tokens without text when nobody asked for ids or log-probs."""
    if isinstance(event, ReasoningDelta):
        return wire.include_reasoning is not False
    if isinstance(event, TextDelta):
        return bool(event.text) or event.logprobs is not None or bool(wire.return_token_ids)
    return True


def stream_choice(event: Delta | Finished, wire: ChatRequest, new_id: Callable[[], str]) -> ChatChunkChoice:
    """One event as a choice of a chunk."""
    if isinstance(event, ReasoningDelta):
        return ChatChunkChoice(index=event.index, delta=ChatDelta(reasoning=event.text, reasoning_content=event.text))
    if isinstance(event, ToolCallDelta):
        return ChatChunkChoice(index=event.index, delta=ChatDelta(tool_calls=[call_delta(event, new_id)]))
    if isinstance(event, Finished):
        return ChatChunkChoice(
            index=event.index, delta=ChatDelta(), finish_reason=event.finish_reason, stop_reason=event.stop_reason
        )
    return ChatChunkChoice(
        index=event.index,
        delta=ChatDelta(content=event.text),
        logprobs=ChatLogprobs(content=wire_logprobs(event.logprobs)) if event.logprobs is not None else None,
        token_ids=list(event.token_ids) if wire.return_token_ids else msgspec.UNSET,
    )


def call_delta(event: ToolCallDelta, new_id: Callable[[], str]) -> CallDelta:
    """A call's first part has its id, type and name; the others only text."""
    if event.name is None:
        return CallDelta(index=event.call, function=CallFunctionDelta(arguments=event.arguments))
    return CallDelta(
        index=event.call,
        id=event.call_id or call_id(new_id),
        type="function",
        function=CallFunctionDelta(name=event.name, arguments=event.arguments),
    )


def wire_logprobs(entries: Sequence[TokenLogprob]) -> list[TokenLogprobWire]:
    """OpenAI's chat form."""
    return [
        TokenLogprobWire(
            token=entry.chosen.token,
            logprob=entry.chosen.logprob,
            bytes=list(entry.chosen.bytes_),
            top_logprobs=[
                TopLogprobWire(token=top.token, logprob=top.logprob, bytes=list(top.bytes_)) for top in entry.top
            ],
        )
        for entry in entries
    ]
