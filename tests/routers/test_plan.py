"""Aspects and plans: pure, exact, and refused with a name."""

from __future__ import annotations

import pytest

from policies.load import parse_policy
from routers.decompose import decompose
from routers.explain import explain_plan
from routers.plan import make_plan
from routers.types import Aspect, BadRequestError, Candidate, CanonicalRequest, Params

MODELS = """
version: facet/v1
models:
  small: {source: x, price: {input_usd_per_mtok: 1}}
  vectors: {source: y, task: embed, price: {input_usd_per_mtok: 1}}
aliases: {gpt-4o-mini: small}
"""


def request(model: str = "small", **params: object) -> CanonicalRequest:
    return CanonicalRequest(request_id="r", surface="chat", model=model, prompts=("x",), params=Params(**params))


def test_the_one_aspect_says_why() -> None:
    assert decompose(request()) == (Aspect(name="answer", why="structural: a chat request"),)


def test_an_alias_is_resolved_and_the_plan_is_the_same_each_time() -> None:
    policy = parse_policy(MODELS)
    plans = [make_plan(decompose(request(name)), request(name), policy) for name in ("gpt-4o-mini", "small")]
    assert plans[0] == plans[1]
    assert plans[0].steps[0].candidates == (Candidate(model="small"),)
    assert explain_plan(plans[0])["steps"][0]["models"] == ["small"]
    assert plans[0].policy_revision == policy.revision


def test_an_unknown_model_is_a_404_with_near_names() -> None:
    with pytest.raises(BadRequestError, match=r"'smal' does not exist. Did you mean 'small'") as refused:
        make_plan(decompose(request("smal")), request("smal"), parse_policy(MODELS))
    assert (refused.value.status, refused.value.code, refused.value.param) == (404, "model_not_found", "model")


def test_an_embed_model_does_not_answer() -> None:
    with pytest.raises(BadRequestError, match="'vectors' embeds; this route needs one that generates text: small"):
        make_plan(decompose(request("vectors")), request("vectors"), parse_policy(MODELS))


def test_the_policy_caps_amplification() -> None:
    policy = parse_policy(MODELS + "budget: {max_amplification: 2}\n")
    assert make_plan(decompose(request()), request(n=2), policy).rule == "default"
    with pytest.raises(BadRequestError, match=r"n is 3: the plan would compute 3 answers.*max_amplification is 2"):
        make_plan(decompose(request()), request(n=3), policy)


def test_members_override_what_the_client_asked() -> None:
    policy = parse_policy(MODELS + "default: {members: [{model: small, temperature: 0, max_tokens: 7}]}\n")
    plan = make_plan(decompose(request("other")), request("other"), policy)
    assert plan.steps[0].candidates == (Candidate(model="small", overrides={"temperature": 0, "max_tokens": 7}),)
