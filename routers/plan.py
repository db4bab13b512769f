"""Aspects and policy to a plan: which models are asked for what. Pure; the fleet is not asked, so a plan is the same
wherever it is made.

Knows nothing of replicas, text or time. Read next: `routers/execute.py`.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from policies.schema import Member, Policy
from routers.types import Aspect, BadRequestError, Candidate, CanonicalRequest, Plan, Step

DEFAULT_RULE = "default"


def make_plan(aspects: Sequence[Aspect], request: CanonicalRequest, policy: Policy) -> Plan:
    """One step an aspect. Raises BadRequestError: 404 for a model nobody knows, 400 for one that cannot answer."""
    steps = tuple(
        Step(
            id=f"{number}-{aspect.name}",
            aspect=aspect,
            candidates=tuple(candidate(member, request, policy) for member in policy.default.members),
            deadline_ms=policy.default.deadline_ms,
        )
        for number, aspect in enumerate(aspects)
    )
    check_amplification(steps, request, policy)
    content = msgspec.json.encode((steps, DEFAULT_RULE, policy.revision), order="sorted")
    digest = hashlib.sha256(content).hexdigest()[:12]
    return Plan(steps=steps, rule=DEFAULT_RULE, policy_revision=policy.revision, digest=digest)


def candidate(member: Member, request: CanonicalRequest, policy: Policy) -> Candidate:
    """The member as a model that exists, with what the policy overrides."""
    name = resolve_model(request.model if member.model == "*" else member.model, policy, task="generate")
    overrides: dict[str, Any] = {}
    if member.temperature is not None:
        overrides["temperature"] = member.temperature
    if member.max_tokens is not None:
        overrides["max_tokens"] = member.max_tokens
    return Candidate(model=name, overrides=overrides)


def resolve_model(name: str, policy: Policy, *, task: str) -> str:
    """The policy's model for a client's name. Raises BadRequestError."""
    resolved = policy.resolve(name)
    if resolved is None:
        known = sorted([*policy.models, *policy.aliases])
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"Did you mean {' or '.join(repr(n) for n in near)}?" if near else f"Available: {', '.join(known)}."
        raise BadRequestError(
            f"The model {name!r} does not exist. {hint}", param="model", code="model_not_found", status=404
        )
    model = policy.models[resolved]
    if model.task != task:
        wanted = {"generate": "generates text", "embed": "embeds"}
        able = sorted(name for name, other in policy.models.items() if other.task == task)
        raise BadRequestError(
            f"The model {resolved!r} {wanted[model.task]}; this route needs one that {wanted[task]}: "
            f"{', '.join(able) or 'none is configured'}.",
            param="model",
            code="model_not_supported",
        )
    return resolved


def check_amplification(steps: Sequence[Step], request: CanonicalRequest, policy: Policy) -> None:
    """Answers asked for at once must stay under the policy's cap."""
    asked = request.params.n * sum(len(step.candidates) for step in steps)
    limit = policy.budget.max_amplification
    if asked > limit:
        raise BadRequestError(
            f"n is {request.params.n}: the plan would compute {asked} answers, and the policy's "
            f"budget.max_amplification is {limit:g}.",
            param="n",
            code="amplification_exceeded",
        )
