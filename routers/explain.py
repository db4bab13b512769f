"""Plans and decisions as small plain documents, for headers, logs and `explain`.

Read next: `routers/types.py`.
"""

from __future__ import annotations

from typing import Any

from routers.types import Decision, Plan


def explain_plan(plan: Plan) -> dict[str, Any]:
    """Which rule made it and whom each step asks, with the ground of each aspect."""
    return {
        "digest": plan.digest,
        "rule": plan.rule,
        "policy_revision": plan.policy_revision,
        "steps": [
            {
                "id": step.id,
                "aspect": step.aspect.name,
                "why": step.aspect.why,
                "models": [candidate.model for candidate in step.candidates],
                "reducer": step.reducer,
            }
            for step in plan.steps
        ],
    }


def explain_decision(decision: Decision) -> dict[str, Any]:
    """The chosen replica, and every cost term of all that could have been."""
    return {
        "step": decision.step,
        "model": decision.model,
        "replica": decision.replica,
        "policy": decision.policy,
        "costs": {
            cost.replica: {"total_ms": cost.total_ms, **{term.name: term.value for term in cost.terms}}
            for cost in decision.costs
        },
    }
