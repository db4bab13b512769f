"""What types cannot say of a policy: names that must exist, aliases that must end, models that fit their use.

Knows nothing of files. Read next: `policies/load.py` (who adds the places).
"""

from __future__ import annotations

from collections.abc import Iterator

from policies.fault import Fault, Path, hint
from policies.schema import Policy

# The ledger counts in whole micro-USD per million tokens.
MICROS = 1_000_000


def check_policy(policy: Policy) -> list[Fault]:
    """Every fault, in the order of the sections."""
    return [*check_models(policy), *check_aliases(policy), *check_plan(policy)]


def check_models(policy: Policy) -> Iterator[Fault]:
    """Somebody must answer, at a price that can be charged exactly."""
    for name, model in policy.models.items():
        for field in ("input_usd_per_mtok", "output_usd_per_mtok"):
            price: float = getattr(model.price, field)
            if abs(round(price * MICROS) - price * MICROS) > 1e-6 * max(1.0, price):
                yield Fault(
                    path=("models", name, "price", field),
                    message=f"{price:g} is finer than 0.000001 USD per million tokens, which is the smallest step",
                )
    if not any(model.task == "generate" for model in policy.models.values()):
        yield Fault(path=("models",), message="no model has `task: generate`; at least one must", at_key=True)


def check_aliases(policy: Policy) -> Iterator[Fault]:
    """An alias names a model and hides none. Alias to alias is refused, so that one look is enough to see where a
    name leads.
    """
    for alias, target in policy.aliases.items():
        path: Path = ("aliases", alias)
        if alias in policy.models:
            yield Fault(path=path, message=f"there is a model `{alias}`; an alias may not hide it", at_key=True)
        elif target in policy.models:
            continue
        elif target not in policy.aliases:
            yield Fault(path=path, message=f"`{target}` is no model{hint(target, policy.models)}")
        else:
            chain = follow(alias, policy)
            if chain[-1] in policy.models:
                message = f"`{target}` is an alias too; name the model itself: `{chain[-1]}`"
            elif chain[-1] in chain[:-1]:
                message = f"aliases go in a circle: {' -> '.join(f'`{name}`' for name in chain)}"
            else:
                message = f"`{target}` is an alias too, and `{chain[-1]}` at its end is no model"
            yield Fault(path=path, message=message)


def follow(alias: str, policy: Policy) -> list[str]:
    """From an alias to a model, to a name that is nothing, or to where the chain has been before."""
    chain = [alias]
    while chain[-1] in policy.aliases and chain[-1] not in policy.models and chain[-1] not in chain[:-1]:
        chain.append(policy.aliases[chain[-1]])
    return chain


def check_plan(policy: Policy) -> Iterator[Fault]:
    """Members of the default plan exist and generate."""
    for number, member in enumerate(policy.default.members):
        path: Path = ("default", "members", number, "model")
        if member.model == "*":
            continue
        model = policy.models.get(member.model)
        if model is None:
            also = "; members are models, not aliases" if member.model in policy.aliases else ""
            yield Fault(path=path, message=f"`{member.model}` is no model{hint(member.model, policy.models)}{also}")
        elif model.task != "generate":
            able = hint("", (name for name, other in policy.models.items() if other.task == "generate"))
            yield Fault(path=path, message=f"`{member.model}` embeds; a plan needs a model that generates{able}")
