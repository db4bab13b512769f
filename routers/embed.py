"""Embeddings through the routers: the model behind the name, its replica, tokens, and vectors cut to size.

Knows nothing of wire formats or money. Read next: `routers/execute.py`, `engines/models/encoder.py`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence

from engines.api import Capabilities, EmbedRequest, EngineDeadError
from engines.text.model import TextModel
from policies.schema import Policy
from routers.fleet import Fleet
from routers.plan import resolve_model
from routers.prompt import INLINE_CHARS
from routers.select import ReplicaSelector
from routers.types import AspectUsage, BadRequestError, UnavailableError, Value

EMBED = "embed"


class CanonicalEmbedding(Value, frozen=True, kw_only=True):
    """Texts or token ids, exactly one of them. `dimensions` None: the model's own."""

    request_id: str
    model: str
    texts: tuple[str, ...] = ()
    ids: tuple[tuple[int, ...], ...] = ()
    dimensions: int | None = None
    trace_parent: str = ""


class Embedded(Value, frozen=True, kw_only=True):
    """`vectors[i]`: little-endian float32 of input i, of length 1."""

    model: str
    vectors: tuple[bytes, ...]
    usage: AspectUsage


async def embed(request: CanonicalEmbedding, policy: Policy, fleet: Fleet, selector: ReplicaSelector) -> Embedded:
    """Raises RouteError or EngineError."""
    model = resolve_model(request.model, policy, task="embed")
    replicas = fleet.replicas(model)
    living = next((replica for replica in replicas if replica.alive), None)
    if living is None:
        raise UnavailableError(f"No replica of {model!r} is ready; it is being restarted. Try again in a moment.")
    inputs = await encode_inputs(request, living.text)
    capabilities = living.engine.capabilities
    check_inputs(inputs, request, capabilities)
    num_tokens = sum(map(len, inputs))
    replica, _ = selector.choose("embed", model, replicas, num_tokens)
    with replica.carrying(num_tokens):
        try:
            result = await replica.engine.embed(
                EmbedRequest(request_id=request.request_id, inputs=inputs, trace_parent=request.trace_parent)
            )
        except EngineDeadError as error:
            raise UnavailableError(f"The engine ended while it served this request: {error}") from error
    usage = AspectUsage(
        aspect=EMBED,
        step="0-embed",
        model=model,
        replica=replica.name,
        prompt_tokens=result.prompt_tokens,
        cached_tokens=0,
        completion_tokens=0,
    )
    vectors = tuple(shortened(vector, request.dimensions) for vector in result.vectors)
    return Embedded(model=model, vectors=vectors, usage=usage)


async def encode_inputs(request: CanonicalEmbedding, text: TextModel) -> list[list[int]]:
    """Token ids of each input; much text goes to a thread."""
    if request.ids:
        return [list(ids) for ids in request.ids]
    if sum(map(len, request.texts)) <= INLINE_CHARS:
        return [text.encode_for_embedding(item) for item in request.texts]
    return await asyncio.to_thread(lambda: [text.encode_for_embedding(item) for item in request.texts])


def check_inputs(inputs: Sequence[Sequence[int]], request: CanonicalEmbedding, capabilities: Capabilities) -> None:
    """Raises BadRequestError naming the input and the limit."""
    limit = capabilities.max_model_len
    for number, ids in enumerate(inputs):
        if not ids:
            raise BadRequestError(f"input[{number}] is empty.", param="input", code="empty_input")
        if len(ids) > limit:
            raise BadRequestError(
                f"This model's maximum input length is {limit} tokens; input[{number}] has {len(ids)}.",
                param="input",
                code="context_length_exceeded",
            )
        stray = next((token for token in ids if not 0 <= token < capabilities.vocab_size), None)
        if stray is not None:
            raise BadRequestError(
                f"input[{number}] holds the token id {stray}; this model's ids are 0..{capabilities.vocab_size - 1}.",
                param="input",
                code="invalid_token_id",
            )
    full = capabilities.embedding_dimensions
    if request.dimensions is not None and not 1 <= request.dimensions <= full:
        raise BadRequestError(
            f"dimensions is {request.dimensions}; allowed: 1 to {full} for this model.",
            param="dimensions",
            code="invalid_value",
        )


def shortened(vector: bytes, dimensions: int | None) -> bytes:
    """The first `dimensions` components, scaled to length 1 again."""
    if dimensions is None or 4 * dimensions == len(vector):
        return vector
    values = struct.unpack(f"<{dimensions}f", vector[: 4 * dimensions])
    norm = sum(value * value for value in values) ** 0.5 or 1.0
    return struct.pack(f"<{dimensions}f", *(value / norm for value in values))
