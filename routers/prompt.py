"""A canonical request to what an engine is asked: token ids and sampling parameters, checked against the model.

Knows nothing of replicas or streams. Read next: `routers/execute.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from engines.api import Capabilities, SamplingParams
from engines.text.errors import TemplateError
from engines.text.model import TextModel
from routers.types import BadRequestError, CanonicalRequest, Message, Params, Tool

# Shorter texts are encoded in well under a millisecond; longer ones go to a thread, so that the loop stays free.
INLINE_CHARS = 16_384


async def encode_prompts(request: CanonicalRequest, text: TextModel) -> list[list[int]]:
    """Token ids of each prompt. Raises BadRequestError for messages that the template refuses or an empty prompt."""
    if request.prompts_ids:
        prompts = [list(ids) for ids in request.prompts_ids]
    elif num_chars(request) <= INLINE_CHARS:
        prompts = encode_now(request, text)
    else:
        prompts = await asyncio.to_thread(encode_now, request, text)
    return prompts


def encode_now(request: CanonicalRequest, text: TextModel) -> list[list[int]]:
    """As above, on the calling thread."""
    if request.messages:
        messages = [template_message(message) for message in request.messages]
        try:
            tools = [template_tool(tool) for tool in request.tools]
            return [text.encode_chat(messages, tools=tools, **request.template_kwargs)]
        except TemplateError as error:
            raise BadRequestError(str(error), param="messages", code="invalid_messages") from error
    return [text.encode(prompt) for prompt in request.prompts]


def num_chars(request: CanonicalRequest) -> int:
    """Characters that would have to be encoded."""
    return sum(len(message.content) for message in request.messages) + sum(map(len, request.prompts))


def template_message(message: Message) -> dict[str, Any]:
    """The mapping a chat template reads."""
    named = {"name": message.name} if message.name is not None else {}
    return {"role": message.role, "content": message.content, **named, **message.extra}


def template_tool(tool: Tool) -> dict[str, Any]:
    """The mapping a chat template prints."""
    described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": described}


def check_prompts(prompts: Sequence[Sequence[int]], request: CanonicalRequest, capabilities: Capabilities) -> None:
    """Raises BadRequestError for an empty prompt, an id out of vocabulary, or one that leaves no room for a token."""
    param = "messages" if request.messages else "prompt"
    limit = capabilities.max_model_len
    for prompt in prompts:
        if not prompt:
            raise BadRequestError(f"{param} is empty: at least one token is needed.", param=param, code="empty_prompt")
        wanted = request.params.max_tokens or 1
        if len(prompt) + wanted > limit:
            asked = f" and max_tokens is {wanted}" if request.params.max_tokens is not None else ""
            raise BadRequestError(
                f"This model's maximum context length is {limit} tokens; {param} has {len(prompt)} tokens{asked}. "
                "Shorten it or ask for fewer tokens.",
                param=param,
                code="context_length_exceeded",
            )
        stray = next((token for token in prompt if not 0 <= token < capabilities.vocab_size), None)
        if stray is not None:
            raise BadRequestError(
                f"{param} holds the token id {stray}; this model's ids are 0..{capabilities.vocab_size - 1}.",
                param=param,
                code="invalid_token_id",
            )


def check_token_ids(params: Params, capabilities: Capabilities) -> None:
    """Raises BadRequestError for ids in `logit_bias` or `stop_token_ids` that the model does not have."""
    for field, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        stray = next((token for token in ids if not 0 <= token < capabilities.vocab_size), None)
        if stray is not None:
            raise BadRequestError(
                f"{field} names the token id {stray}; this model's ids are 0..{capabilities.vocab_size - 1}.",
                param=field,
                code="invalid_token_id",
            )


def effective_params(params: Params, overrides: dict[str, Any], *, seed: int, room: int) -> Params:
    """What will really be used: the policy's overrides, the seed, and `max_tokens` filled from the context left."""
    merged = msgspec.structs.replace(params, **overrides)
    max_tokens = room if merged.max_tokens is None else min(merged.max_tokens, room)
    return msgspec.structs.replace(merged, seed=seed, max_tokens=max_tokens)


def sampling(params: Params, text: TextModel) -> SamplingParams:
    """For the engine; `params` must be effective ones. End-of-sequence ids stop unless `ignore_eos`."""
    assert params.max_tokens is not None, "effective_params() first"
    assert params.seed is not None, "effective_params() first"
    eos = () if params.ignore_eos else text.eos_token_ids
    return SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        seed=params.seed,
        stop_token_ids=tuple(dict.fromkeys((*eos, *params.stop_token_ids))),
        logprobs=params.logprobs,
    )
