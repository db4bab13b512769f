"""What all handlers share: the answer's identity, evidence headers, usage in wire form.

Read next: `gateway/handlers/chat.py`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request

from gateway.errors import from_exception
from gateway.limits import REQUEST_ID
from gateway.pipeline import Pipeline
from gateway.settings import Limits
from gateway.sse import frame
from gateway.wire.openai import AspectUsageWire, CompletionTokensDetails, PromptTokensDetails, UsageWire
from routers.types import CanonicalRequest, Event, Finished, RequestUsage, Started

logger = logging.getLogger("facet.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """What handlers are given: the pipeline, limits, and how to make ids and timestamps. In `app.state.surface`."""

    pipeline: Pipeline
    limits: Limits
    new_id: Callable[[], str]
    wall_clock: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Constant over all frames of one answer. `request_id` is what the log knows it by."""

    id: str
    request_id: str
    created: int
    model: str
    fingerprint: str


def request_id_of(headers: Mapping[str, str], surface: Surface) -> str:
    """The client's x-request-id when it is harmless, else a new one."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else surface.new_id()


def surface_of(request: Request[Any, Any, Any]) -> Surface:
    """From the application's state."""
    surface: Surface = request.app.state.surface
    return surface


async def begin(events: AsyncGenerator[Event, None]) -> Started:
    """Wait for the first token. Errors before it are raised here, while a status can still be chosen."""
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    assert isinstance(first, Started), f"the first event is {first}"
    return first


def evidence(started: Started, request: CanonicalRequest) -> dict[str, str]:
    """Headers that say what served the answer."""
    return {
        "x-request-id": request.request_id,
        "x-served-by": started.decisions[-1].replica,
        "x-facet-plan": started.plan.digest,
    }


def identity(prefix: str, started: Started, request: CanonicalRequest, surface: Surface) -> Identity:
    """Made once an answer has begun. `model` is the one that answers."""
    return Identity(
        id=f"{prefix}-{surface.new_id()}",
        request_id=request.request_id,
        created=int(surface.wall_clock()),
        model=started.decisions[-1].model,
        fingerprint=fingerprint(started),
    )


def fingerprint(started: Started) -> str:
    """Equal fingerprints, seeds and parameters give equal answers: policy revision and plan."""
    return f"fp_{started.plan.policy_revision[:6]}{started.plan.digest[:6]}"


def wire_usage(usage: RequestUsage) -> UsageWire:
    """`usage` with its aspects."""
    return UsageWire(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        aspects=[
            AspectUsageWire(
                aspect=aspect.aspect,
                model=aspect.model,
                replica=aspect.replica,
                prompt_tokens=aspect.prompt_tokens,
                cached_tokens=aspect.cached_tokens,
                completion_tokens=aspect.completion_tokens,
            )
            for aspect in usage.aspects
        ],
    )


def error_frame(error: Exception, request_id: str) -> bytes:
    """The one frame that ends a stream in which something failed. Our own faults are logged with their trace."""
    answer = from_exception(error)
    if answer.status == 500:
        logger.error("%s: its stream failed", request_id, exc_info=error)
    else:
        logger.warning("%s: its stream failed: %s", request_id, error)
    return frame(answer.document)


class Gathered:
    """The pieces of one choice, for a whole answer."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        self.finished: Finished | None = None


encode = msgspec.json.encode
