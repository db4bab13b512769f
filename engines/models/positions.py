"""How far a model's positions reach: rotary scaling and windows, from config.json, from GGUF's keys, from our own.

Fills in what a file leaves to custom (the trained length, YaRN's attention factor), checks the numbers, and gives the
longest context. Knows nothing of weights or of how a scaling is computed.

Read next: `engines/ops/rope_scaling.py`, `engines/models/registry.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import isfinite, log
from typing import Any

import msgspec

from engines.config import ModelConfig, RopeScaling
from engines.models.base import CheckpointError, ModelSpec

HF_KINDS = ("linear", "dynamic", "yarn", "llama3")
GGUF_KINDS = ("linear", "yarn")


def running_spec(config: ModelConfig, facts: ModelSpec, dtype: str, version: str) -> ModelSpec:
    """The checkpoint's facts under the configured name, length, positions and number format.

    `version` names the arithmetic of `dtype`. The digest tells apart whatever gives other tokens. Raises
    CheckpointError if the length is beyond what the positions reach.
    """
    placed = placed_spec(config, facts)
    identity = f"{facts.digest}|{dtype}|{version}"
    if config.rope_scaling is not None:
        identity += f"|{msgspec.json.encode(placed.rope_scaling).decode()}"
    if placed.rope_scaling is not None and placed.rope_scaling.kind == "dynamic":
        identity += f"|{placed.max_model_len}"  # the base follows from the length
    if config.kv_dtype != "float32":
        if facts.task != "generate":
            raise CheckpointError(f"{config.name}: kv_dtype is for a decoder, which keeps keys and values")
        identity += f"|kv {config.kv_dtype}"
    return msgspec.structs.replace(
        placed, name=config.name, dtype=dtype, kv_dtype=config.kv_dtype, digest=_digest(identity)
    )


def placed_spec(config: ModelConfig, facts: ModelSpec) -> ModelSpec:
    """The checkpoint's facts with the length, the scaling and the windows that will run. Raises CheckpointError."""
    scaling, reach = facts.rope_scaling, facts.max_positions or facts.max_model_len
    limit = config.max_model_len or facts.max_model_len
    if config.rope_scaling is not None:
        if facts.task != "generate":
            raise CheckpointError(f"{config.name}: rope_scaling is for a decoder with rotary positions")
        scaling = checked_scaling(config.rope_scaling, facts, config.name)
        reach = scaled_length(scaling)
        limit = config.max_model_len or reach
    if limit > reach:
        raise CheckpointError(
            f"{config.name}: max_model_len {limit} is beyond the model's own {reach}"
            " (rope_scaling with a larger factor reaches further)"
        )
    windows = tuple(window if window < limit else 0 for window in facts.windows)  # no context outgrows the others
    return msgspec.structs.replace(
        facts,
        max_model_len=limit,
        max_positions=reach,
        rope_scaling=scaling,
        windows=windows if any(windows) else (),
    )


def weights_key(facts: ModelSpec, dtype: str, version: str) -> str:
    """Names the packed weights, which do not follow from the positions; the running digest where nothing is scaled."""
    return _digest(f"{facts.digest}|{dtype}|{version}")


def _digest(identity: str) -> str:
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def checked_scaling(scaling: RopeScaling, facts: ModelSpec, source: str) -> RopeScaling:
    """`scaling` with its trained length, if its numbers make sense. Raises CheckpointError naming the field."""
    own = facts.rope_scaling.original_max_positions if facts.rope_scaling is not None else 0
    trained = scaling.original_max_positions or own or facts.max_model_len
    problems = {
        "factor": (scaling.factor, isfinite(scaling.factor) and 1 <= scaling.factor <= 1024),
        "original_max_positions": (trained, trained >= 1),
        "attention_factor": (scaling.attention_factor, 0 <= scaling.attention_factor <= 100),
        "beta_fast": (scaling.beta_fast, scaling.beta_fast >= scaling.beta_slow > 0),
        "low_freq_factor": (scaling.low_freq_factor, 0 < scaling.low_freq_factor < scaling.high_freq_factor),
        "factors": (len(scaling.factors), len(scaling.factors) == (facts.head_dim // 2) * (scaling.kind == "factors")),
    }
    for field, (value, fine) in problems.items():
        if not fine:
            raise CheckpointError(f"{source}: rope_scaling {scaling.kind}: {field} is {value}, which cannot be")
    if min(scaling.factors, default=1.0) <= 0:
        raise CheckpointError(f"{source}: rope_scaling factors: {min(scaling.factors)} is not above 0")
    return msgspec.structs.replace(scaling, original_max_positions=trained)


def scaled_length(scaling: RopeScaling) -> int:
    """Longest context, tokens."""
    return int(scaling.original_max_positions * scaling.factor)


def with_scaling(facts: ModelSpec, scaling: RopeScaling | None, source: str) -> ModelSpec:
    """A checkpoint's facts with the scaling that its own files name.

    Its length stays what the files say; a configuration may raise it to what the scaling reaches.
    """
    if scaling is None:
        return msgspec.structs.replace(facts, max_positions=facts.max_model_len)
    full = checked_scaling(scaling, facts, source)
    reach = max(facts.max_model_len, scaled_length(full))
    return msgspec.structs.replace(facts, rope_scaling=full, max_positions=reach)


def scaling_of_config(parameters: Mapping[str, Any], source: str) -> RopeScaling | None:
    """Of `rope_parameters` or `rope_scaling` in config.json. Raises CheckpointError for a kind that is not ours."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in ("default", "mrope"):
        if kind == "mrope":
            raise CheckpointError(f"{source}: rotary scaling 'mrope' is not supported")
        return None
    if kind not in HF_KINDS:
        raise CheckpointError(f"{source}: rotary scaling {kind!r} is not supported ({', '.join(HF_KINDS)} are)")
    if parameters.get("factor") is None:
        raise CheckpointError(f"{source}: rope_scaling {kind!r} has no factor")
    fields = {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_positions",
        "attention_factor": "attention_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    }
    found = {ours: parameters[theirs] for theirs, ours in fields.items() if parameters.get(theirs) is not None}
    try:
        scaling = msgspec.convert({"kind": kind, **found}, RopeScaling)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{source}: rope_scaling: {error}") from error
    mscale, whole = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if kind == "yarn" and not scaling.attention_factor and mscale and whole:
        ratio = (0.1 * float(mscale) * log(scaling.factor) + 1) / (0.1 * float(whole) * log(scaling.factor) + 1)
        scaling = msgspec.structs.replace(scaling, attention_factor=ratio)
    return scaling


def scaling_of_gguf(metadata: Mapping[str, Any], architecture: str, source: str) -> RopeScaling | None:
    """Of `{architecture}.rope.scaling.*`, or of the older `{architecture}.rope.scale_linear`."""
    at = f"{architecture}.rope.scaling"
    kind = metadata.get(f"{at}.type", "none")
    older = metadata.get(f"{architecture}.rope.scale_linear")
    if kind == "none" and isinstance(older, float) and older != 1.0:
        return RopeScaling(kind="linear", factor=older)
    if kind == "none":
        return None
    if kind not in GGUF_KINDS:
        raise CheckpointError(f"{source}: rotary scaling {kind!r} is not supported ({', '.join(GGUF_KINDS)} are)")
    fields = {
        "factor": "factor",
        "original_context_length": "original_max_positions",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    found = {ours: metadata[f"{at}.{theirs}"] for theirs, ours in fields.items() if f"{at}.{theirs}" in metadata}
    try:
        scaling = msgspec.convert({"kind": kind, **found}, RopeScaling)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{source}: {at}: {error}") from error
    extra = metadata.get(f"{at}.attn_factor", metadata.get(f"{at}.yarn_attn_factor"))
    if kind == "yarn" and isinstance(extra, float) and scaling.factor >= 1:
        # llama.cpp multiplies its own factor with the paper's.
        scaling = msgspec.structs.replace(scaling, attention_factor=extra * (0.1 * log(scaling.factor) + 1))
    return scaling


def windows_of_config(config: Mapping[str, Any], num_layers: int, source: str) -> tuple[int, ...]:
    """Tokens that each layer sees, 0 for all; empty if no layer has a window.

    `layer_types` names the layers with one; without it Qwen's are those from `max_window_layers` on, Mistral's are all.
    """
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", True):
        return ()
    if not isinstance(window, int) or window < 1:
        raise CheckpointError(f"{source}: sliding_window is {window!r}, not a positive integer")
    kinds = config.get("layer_types")
    if kinds is not None:
        known = {"sliding_attention": window, "full_attention": 0}
        if len(kinds) != num_layers or not known.keys() >= set(kinds):
            raise CheckpointError(f"{source}: layer_types has {len(kinds)} entries of {sorted(set(kinds))}")
        return tuple(known[kind] for kind in kinds)
    first = int(config.get("max_window_layers", 0)) if "use_sliding_window" in config else 0
    return tuple(window if layer >= first else 0 for layer in range(num_layers))
