"""POST /v1/embeddings: texts or token ids to vectors, as floats or base64 (openai-python asks for base64).

Read next: `routers/embed.py`.
"""

from __future__ import annotations

import base64
import struct
from typing import Any

import msgspec
from litestar import Request, post
from litestar.types import ASGIApp

from gateway.errors import out_of_range
from gateway.handlers.common import encode, request_id_of, surface_of
from gateway.handlers.completions import split_prompt
from gateway.handlers.params import decode
from gateway.settings import Limits
from gateway.sse import JsonAnswer, unless_gone
from gateway.wire.openai import EmbeddingItem, EmbeddingRequest, EmbeddingResponse, EmbeddingUsage
from routers.embed import CanonicalEmbedding

DECODER = msgspec.json.Decoder(EmbeddingRequest)


@post("/v1/embeddings", status_code=200)
async def embeddings(request: Request[Any, Any, Any]) -> ASGIApp:
    """OpenAI's embeddings."""
    surface = surface_of(request)
    caller = await surface.pipeline.authenticate(request.headers)
    wire: EmbeddingRequest = decode(DECODER, await request.body())
    canonical = to_canonical(wire, request_id_of(request.headers, surface), surface.limits)
    embedded = await unless_gone(request.receive, surface.pipeline.embed(caller, canonical))
    used = embedded.usage.prompt_tokens
    response = EmbeddingResponse(
        data=[
            EmbeddingItem(index=index, embedding=wire_vector(vector, wire.encoding_format or "float"))
            for index, vector in enumerate(embedded.vectors)
        ],
        model=embedded.model,
        usage=EmbeddingUsage(prompt_tokens=used, total_tokens=used),
    )
    headers = {"x-request-id": canonical.request_id, "x-served-by": embedded.usage.replica}
    return JsonAnswer(encode(response), headers=headers)


def to_canonical(wire: EmbeddingRequest, new_id: str, limits: Limits) -> CanonicalEmbedding:
    """Raises ApiError for an empty or too long list."""
    texts, ids = split_prompt(wire.input, "input")
    if not 1 <= len(texts) + len(ids) <= limits.embedding_inputs:
        raise out_of_range("input", f"a list of {len(texts) + len(ids)}", f"1 to {limits.embedding_inputs} inputs")
    return CanonicalEmbedding(request_id=new_id, model=wire.model, texts=texts, ids=ids, dimensions=wire.dimensions)


def wire_vector(vector: bytes, form: str) -> list[float] | str:
    """Little-endian float32 as base64, or as numbers."""
    if form == "base64":
        return base64.b64encode(vector).decode()
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))
