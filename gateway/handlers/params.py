"""Wire parameters to canonical ones: every range checked, everything that is not served refused by name.

Shared by chat and completions. Knows nothing of messages or prompts.

Read next: `gateway/handlers/chat.py`, `gateway/handlers/completions.py`.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from gateway.errors import ApiError, out_of_range
from gateway.settings import Limits
from gateway.wire.openai import Generation
from routers.types import Params

T = TypeVar("T")

# Fields of the wire Structs that change the answer in a way this version does not serve.
NOT_SERVED = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
    "use_beam_search",
    "length_penalty",
    "prompt_logprobs",
    "logprob_token_ids",
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
    "thinking_token_budget",
    "repetition_detection",
    "logits_processors",
    "kv_transfer_params",
    "lora_path",
    "functions",
    "function_call",
    "audio",
    "prediction",
    "web_search_options",
    "chat_template",
    "continue_final_message",
    "documents",
    "suffix",
)

MAX_SEED = 2**63 - 1
MAX_PRIORITY = 1000
MAX_TOP_K = 1 << 20


def refuse_not_served(request: Generation) -> None:
    """Raises ApiError naming the first field that asks for something this version cannot do."""
    for name in NOT_SERVED:
        if getattr(request, name, None) not in (None, False, [], {}):
            raise ApiError(
                400,
                f"{name} is not served by this version; leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    refuse_constraint_formats(request)


def refuse_constraint_formats(request: Generation) -> None:
    """`response_format` other than plain text, a forced `tool_choice`, and outputs other than text."""
    response_format = getattr(request, "response_format", None)
    if response_format is not None and response_format.get("type") != "text":
        kind = response_format.get("type")
        raise ApiError(
            400,
            f"response_format.type is {kind!r}; this version serves 'text' only.",
            param="response_format",
            code="unsupported_parameter",
        )
    modalities = getattr(request, "modalities", None)
    if modalities and modalities != ["text"]:
        raise out_of_range("modalities", modalities, "['text']")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true.", param="stream_options", code="invalid_value")


def canonical_params(request: Generation, limits: Limits, *, max_tokens: int | None, logprobs: int | None) -> Params:
    """Checked parameters; null and absent mean the default. Raises ApiError naming field, value and limit."""
    defaults = Params()
    params = Params(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        n=1 if request.n is None else request.n,
        temperature=float(or_default(request.temperature, defaults.temperature)),
        top_k=max(0, request.top_k or 0),
        top_p=float(or_default(request.top_p, defaults.top_p)),
        min_p=float(or_default(request.min_p, defaults.min_p)),
        repetition_penalty=float(or_default(request.repetition_penalty, defaults.repetition_penalty)),
        presence_penalty=float(or_default(request.presence_penalty, 0.0)),
        frequency_penalty=float(or_default(request.frequency_penalty, 0.0)),
        logit_bias=logit_bias(request, limits),
        seed=request.seed,
        stop=stops(request, limits),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        include_stop=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        skip_special_tokens=request.skip_special_tokens is not False,
        logprobs=logprobs,
        deterministic=bool(request.deterministic),
    )
    check_ranges(params, request, limits)
    return params


def or_default(value: float | None, default: float) -> float:
    """The value, unless it is null."""
    return default if value is None else value


def check_ranges(params: Params, request: Generation, limits: Limits) -> None:
    """Every number against its range."""
    ranges: tuple[tuple[str, float | None, float, float], ...] = (
        ("n", params.n, 1, limits.choices),
        ("temperature", params.temperature, 0, 2),
        ("top_p", params.top_p, 0, 1),
        ("top_k", request.top_k, -1, MAX_TOP_K),
        ("min_p", params.min_p, 0, 1),
        ("repetition_penalty", params.repetition_penalty, 0.01, 10),
        ("presence_penalty", params.presence_penalty, -2, 2),
        ("frequency_penalty", params.frequency_penalty, -2, 2),
        ("max_tokens", params.max_tokens, 1, 1 << 31),
        ("min_tokens", params.min_tokens, 0, params.max_tokens or 1 << 31),
        ("seed", params.seed, -MAX_SEED - 1, MAX_SEED),
        ("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY),
        ("stop_token_ids", len(params.stop_token_ids), 0, limits.stop_token_ids),
        ("logprobs", params.logprobs, 0, limits.top_logprobs),
    )
    for name, value, low, high in ranges:
        if value is not None and not low <= value <= high:
            raise out_of_range(name, value, f"{low:g} to {high:g}")
    if params.top_p == 0:
        raise out_of_range("top_p", 0, "above 0, up to 1")


def stops(request: Generation, limits: Limits) -> tuple[str, ...]:
    """`stop` as a tuple; an empty string would stop everything and is refused."""
    given = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(given) > limits.stops:
        raise out_of_range("stop", f"{len(given)} strings", f"at most {limits.stops}")
    for number, stop in enumerate(given):
        if not 1 <= len(stop) <= limits.stop_chars:
            raise out_of_range(f"stop[{number}]", f"{len(stop)} characters", f"1 to {limits.stop_chars}")
    return tuple(given)


def logit_bias(request: Generation, limits: Limits) -> dict[int, float]:
    """Keys are token ids written as strings; values -100 to 100."""
    given = request.logit_bias or {}
    if len(given) > limits.logit_bias:
        raise out_of_range("logit_bias", f"{len(given)} entries", f"at most {limits.logit_bias}")
    biases: dict[int, float] = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise out_of_range("logit_bias", f"keyed by {key[:32]!r}", "token ids as keys")
        if not -100 <= value <= 100:
            raise out_of_range(f"logit_bias[{key}]", value, "-100 to 100")
        biases[int(key)] = float(value)
    return biases


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The wire Struct. Raises ApiError with msgspec's message, which names the path of the fault."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`").split("[")[0] or None
        if param is None and "required field `" in message:
            param = message.rpartition("`")[0].rpartition("`")[2]
        raise ApiError(400, f"{message}{f' (at {path.rstrip(chr(96))})' if path else ''}.", param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "The body is nested too deeply.", code="json_too_deep") from error
