"""The pasted lines are exact: what a shell makes of them is one request with the right words."""

from __future__ import annotations

import json
import shlex

from gateway.cli.welcome import QUESTION, curl_line, sdk_line, welcome
from policies.load import parse_policy

URL = "http://127.0.0.1:8080"
KEY = "sk-facet-01-secret"
POLICY = parse_policy(
    "version: facet/v1\nmodels:\n"
    "  embed: {source: e, task: embed, price: {input_usd_per_mtok: 0}}\n"
    "  small: {source: s, price: {input_usd_per_mtok: 0}}\n"
)


def test_the_curl_line_is_one_request() -> None:
    words = shlex.split(curl_line(URL, "small", KEY))
    assert words[:3] == ["curl", "-s", f"{URL}/v1/chat/completions"]
    assert [words[at + 1] for at, word in enumerate(words) if word == "-H"] == [
        "content-type: application/json",
        f"authorization: Bearer {KEY}",
    ]
    assert json.loads(words[words.index("-d") + 1]) == {
        "model": "small",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
    }


def test_the_sdk_line_is_a_program() -> None:
    words = shlex.split(sdk_line(URL, 'a"b', KEY))
    assert words[:2] == ["python", "-c"]
    compile(words[2], "<pasted>", "exec")
    assert f'api_key="{KEY}"' in words[2]
    assert 'model="a\\"b"' in words[2]


def test_without_a_new_key_both_lines_read_the_variable() -> None:
    text = welcome(URL, POLICY, None)
    assert "Bearer $FACET_API_KEY" in text
    assert "\nOPENAI_API_KEY=$FACET_API_KEY python -c 'from openai import OpenAI; client" in text
    assert "api_key" not in text
    assert "`facet keys create NAME` makes one" in text
    assert '"model": "small"' in text, "the first model that generates"


def test_the_first_line_is_for_scripts() -> None:
    assert welcome(URL, POLICY, KEY).splitlines()[0] == f"ready     {URL}"
    assert "FACET_API_KEY" not in welcome(URL, POLICY, KEY)
