"""POST /v1/completions: prompts of text or token ids, n choices each, streamed or whole.

Read next: `gateway/handlers/chat.py` (the same shape, with messages).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
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
from gateway.settings import Limits
from gateway.sse import DONE, EventStream, JsonAnswer, frame, unless_gone
from gateway.wire.openai import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    UsageWire,
)
from routers.types import CanonicalRequest, Event, Finished, RequestUsage, TextDelta, TokenLogprob

DECODER = msgspec.json.Decoder(CompletionRequest)
DEFAULT_MAX_TOKENS = 16


@post("/v1/completions", status_code=200)
async def completions(request: Request[Any, Any, Any]) -> ASGIApp:
    """OpenAI's completions, streamed or whole."""
    surface = surface_of(request)
    caller = await surface.pipeline.authenticate(request.headers)
    wire: CompletionRequest = decode(DECODER, await request.body())
    canonical = to_canonical(wire, request_id_of(request.headers, surface), surface.limits)
    events = surface.pipeline.run(caller, canonical, request.headers)
    if wire.stream:
        started = await unless_gone(request.receive, begin(events))
        frames = stream_frames(events, wire, identity("cmpl", started, canonical, surface))
        return EventStream(await anext(frames), frames, headers=evidence(started, canonical))
    return await unless_gone(request.receive, whole(events, wire, canonical, surface))


def to_canonical(wire: CompletionRequest, new_id: str, limits: Limits) -> CanonicalRequest:
    """Raises ApiError for what is out of range or not served."""
    refuse_not_served(wire)
    if wire.echo:
        raise ApiError(
            400, "echo is not served by this version; leave it out.", param="echo", code="unsupported_parameter"
        )
    if wire.best_of is not None and wire.best_of != (wire.n or 1):
        raise out_of_range("best_of", wire.best_of, f"n, which is {wire.n or 1}")
    texts, ids = split_prompt(wire.prompt, "prompt")
    if not 1 <= len(texts) + len(ids) <= limits.prompts:
        raise out_of_range("prompt", f"a list of {len(texts) + len(ids)}", f"1 to {limits.prompts} prompts")
    max_tokens = DEFAULT_MAX_TOKENS if wire.max_tokens is None else wire.max_tokens
    return CanonicalRequest(
        request_id=new_id,
        surface="completion",
        model=wire.model,
        prompts=texts,
        prompts_ids=ids,
        params=canonical_params(wire, limits, max_tokens=max_tokens, logprobs=wire.logprobs),
        stream=bool(wire.stream),
        priority=wire.priority or 0,
    )


def split_prompt(
    given: str | list[str | int | list[int]], field: str
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """(texts, lists of token ids); one of them is empty. Raises ApiError for a list that mixes kinds."""
    if isinstance(given, str):
        return (given,), ()
    texts = tuple(item for item in given if isinstance(item, str))
    ids = tuple(item for item in given if isinstance(item, int))
    lists = tuple(tuple(item) for item in given if isinstance(item, list))
    if len(given) not in (len(texts), len(ids), len(lists)):
        raise ApiError(
            400,
            f"{field} mixes strings, numbers and lists; send a list of one kind.",
            param=field,
            code="invalid_value",
        )
    return texts, (ids,) if ids else lists


async def whole(
    events: AsyncGenerator[Event, None], wire: CompletionRequest, canonical: CanonicalRequest, surface: Surface
) -> ASGIApp:
    """Wait for everything and answer once."""
    num_prompts = len(canonical.prompts) + len(canonical.prompts_ids)
    async with aclosing(events):
        started = await begin(events)
        choices = [Gathered() for _ in range(num_prompts * canonical.params.n)]
        usage: RequestUsage | None = None
        async for event in events:
            if isinstance(event, TextDelta):
                choices[event.index].text.append(event.text)
                choices[event.index].token_ids += event.token_ids
                choices[event.index].logprobs += event.logprobs or ()
            elif isinstance(event, Finished):
                choices[event.index].finished = event
            elif isinstance(event, RequestUsage):
                usage = event
    assert usage is not None, "a stream without usage"
    made = identity("cmpl", started, canonical, surface)
    response = CompletionResponse(
        id=made.id,
        created=made.created,
        model=made.model,
        system_fingerprint=made.fingerprint,
        choices=[whole_choice(index, gathered, wire) for index, gathered in enumerate(choices)],
        usage=wire_usage(usage),
    )
    return JsonAnswer(encode(response), headers=evidence(started, canonical))


def whole_choice(index: int, gathered: Gathered, wire: CompletionRequest) -> CompletionChoice:
    """One choice of a whole answer."""
    assert gathered.finished is not None, f"choice {index} never finished"
    return CompletionChoice(
        index=index,
        text="".join(gathered.text),
        logprobs=legacy_logprobs(gathered.logprobs, 0) if wire.logprobs is not None else None,
        finish_reason=gathered.finished.finish_reason,
        stop_reason=gathered.finished.stop_reason,
        token_ids=gathered.token_ids if wire.return_token_ids else msgspec.UNSET,
    )


async def stream_frames(
    events: AsyncGenerator[Event, None], wire: CompletionRequest, made: Identity
) -> AsyncGenerator[bytes, None]:
    """Text of each choice, its end; then usage if asked for, and [DONE]. A fault is one error frame."""
    options = wire.stream_options
    with_usage = options is not None and options.include_usage
    usage_before: UsageWire | msgspec.UnsetType | None = None if with_usage else msgspec.UNSET
    offsets: dict[int, int] = {}

    def chunk(choices: list[CompletionChoice], usage: UsageWire | msgspec.UnsetType | None = usage_before) -> bytes:
        return frame(
            CompletionResponse(
                id=made.id,
                created=made.created,
                model=made.model,
                system_fingerprint=made.fingerprint,
                choices=choices,
                usage=usage,
            )
        )

    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, TextDelta):
                    offset = offsets.get(event.index, 0)
                    offsets[event.index] = offset + len(event.text)
                    yield chunk([stream_choice(event, wire, offset)])
                elif isinstance(event, Finished):
                    yield chunk(
                        [
                            CompletionChoice(
                                index=event.index,
                                text="",
                                finish_reason=event.finish_reason,
                                stop_reason=event.stop_reason,
                            )
                        ]
                    )
                elif isinstance(event, RequestUsage) and with_usage:
                    yield chunk([], wire_usage(event))
        yield DONE
    except Exception as error:
        yield error_frame(error, made.request_id)


def stream_choice(event: TextDelta, wire: CompletionRequest, offset: int) -> CompletionChoice:
    """New text as a choice of a chunk."""
    return CompletionChoice(
        index=event.index,
        text=event.text,
        logprobs=legacy_logprobs(event.logprobs, offset) if event.logprobs is not None else None,
        token_ids=list(event.token_ids) if wire.return_token_ids else msgspec.UNSET,
    )


def legacy_logprobs(entries: Sequence[TokenLogprob], offset: int) -> CompletionLogprobs:
    """Parallel lists; `text_offset` counts characters of the choice's text from `offset`."""
    offsets: list[int] = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.chosen.token)
    return CompletionLogprobs(
        tokens=[entry.chosen.token for entry in entries],
        token_logprobs=[entry.chosen.logprob for entry in entries],
        top_logprobs=[{top.token: top.logprob for top in entry.top} for entry in entries],
        text_offset=offsets,
    )
