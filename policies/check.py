"""What types cannot say of a policy: names that must exist, aliases that must end, models that fit their use.

Knows nothing of files. Read next: `policies/load.py` (who adds the places).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from policies.schema import NAME_PATTERN, Policy

Problem = tuple[str, str]


def check_policy(policy: Policy) -> list[Problem]:
    """(path, message) of every fault, in file order of the sections."""
    return [*check_models(policy), *check_aliases(policy), *check_plan(policy)]


def check_models(policy: Policy) -> Iterator[Problem]:
    """Names that can stand in a URL and a header; a price for whatever can be billed."""
    for name, model in policy.models.items():
        path = f"$.models.{name}"
        if not re.match(NAME_PATTERN, name):
            yield path, f"model name {name!r} may hold letters, digits and . _ : / @ + - only, 128 at most"
        if model.price is None:
            yield path, f"model {name!r} has no price; write `price: {{input_usd_per_mtok: 0}}` if it is free"
    if not any(model.task == "generate" for model in policy.models.values()):
        yield "$.models", "no model generates; at least one must have `task: generate`"


def check_aliases(policy: Policy) -> Iterator[Problem]:
    """An alias names a model, never another alias, and hides no model."""
    for alias, target in policy.aliases.items():
        path = f"$.aliases.{alias}"
        if alias in policy.models:
            yield path, f"alias {alias!r} hides the model of that name"
        if target in policy.aliases:
            yield path, f"alias {alias!r} stands for the alias {target!r}; name the model itself"
        elif target not in policy.models:
            yield path, f"alias {alias!r} stands for {target!r}, which is no model{near(target, policy)}"


def check_plan(policy: Policy) -> Iterator[Problem]:
    """Members of the default plan exist and generate."""
    for number, member in enumerate(policy.default.members):
        path = f"$.default.members[{number}].model"
        if member.model == "*":
            continue
        model = policy.models.get(member.model)
        if model is None:
            yield path, f"{member.model!r} is no model{near(member.model, policy)}"
        elif model.task != "generate":
            yield path, f"{member.model!r} embeds; a plan needs a model that generates"


def near(name: str, policy: Policy) -> str:
    """A suggestion from the models' names."""
    found = difflib.get_close_matches(name, policy.models, n=1)
    return f" (did you mean {found[0]!r}?)" if found else f" (models: {', '.join(sorted(policy.models))})"
