"""What operators and clients ask about the server itself: models, health, metrics.

`live` means that the process answers; `ready` that every model has a replica that does. Read next: `routers/fleet.py`.
"""

from __future__ import annotations

from typing import Any

from litestar import Request, get
from litestar.params import FromPath
from litestar.types import ASGIApp

from engines.api import EngineDeadError
from gateway.errors import ApiError
from gateway.handlers.common import Surface, encode, request_id_of, surface_of
from gateway.sse import JsonAnswer
from gateway.wire.openai import ModelCard, ModelList

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@get("/health/live")
async def live() -> dict[str, str]:
    """The event loop turns."""
    return {"status": "live"}


@get("/health/ready")
async def ready(request: Request[Any, Any, Any]) -> ASGIApp:
    """503 until every model has a ready replica, and again while the server shuts down."""
    pipeline = surface_of(request).pipeline
    missing = pipeline.executor.fleet.missing()
    closing = pipeline.admission.closing
    body = encode({"status": "closing" if closing else "starting" if missing else "ready", "missing": missing})
    return JsonAnswer(body, status=503 if missing or closing else 200, headers={})


@get("/v1/models")
async def models(request: Request[Any, Any, Any]) -> ASGIApp:
    """Models of the policy and their aliases."""
    surface = surface_of(request)
    await surface.pipeline.authenticate(request.headers)
    return JsonAnswer(encode(ModelList(data=cards(surface))), headers=named(request, surface))


@get("/v1/models/{name:path}")
async def model(request: Request[Any, Any, Any], name: FromPath[str]) -> ASGIApp:
    """One of them."""
    surface = surface_of(request)
    await surface.pipeline.authenticate(request.headers)
    wanted = name.removeprefix("/")
    for card in cards(surface):
        if card.id == wanted:
            return JsonAnswer(encode(card), headers=named(request, surface))
    raise ApiError(404, f"The model {wanted!r} does not exist.", param="model", code="model_not_found")


@get("/metrics")
async def metrics(request: Request[Any, Any, Any]) -> ASGIApp:
    """Prometheus text."""
    pipeline = surface_of(request).pipeline
    pipeline.metrics.in_flight.set(pipeline.admission.in_flight)
    return JsonAnswer(await pipeline.metrics.exposition(), headers={}, kind=METRICS_TYPE)


def named(request: Request[Any, Any, Any], surface: Surface) -> dict[str, str]:
    """The header that every answer of the API has."""
    return {"x-request-id": request_id_of(request.headers, surface)}


def cards(surface: Surface) -> list[ModelCard]:
    """Models, then aliases; `*` is not a name."""
    pipeline = surface.pipeline
    policy = pipeline.policy()
    created = int(surface.wall_clock())
    lengths = {name: context_length(surface, name) for name in policy.models}
    own = [ModelCard(id=name, created=created, root=name, max_model_len=lengths[name]) for name in policy.models]
    aliases = [
        ModelCard(id=alias, created=created, root=target, max_model_len=lengths[target])
        for alias, target in policy.aliases.items()
        if alias != "*"
    ]
    return own + aliases


def context_length(surface: Surface, model: str) -> int | None:
    """Of the first replica that has ever been ready."""
    for replica in surface.pipeline.executor.fleet.replicas(model):
        try:
            return replica.engine.capabilities.max_model_len
        except EngineDeadError:
            continue
    return None
