"""What a gateway says when it is ready: where it is, and lines that work as pasted.

Knows nothing of how it was started. Read next: `gateway/cli/serve.py`.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies.schema import Policy

QUESTION = "Name three primary colours."


def welcome(url: str, policy: Policy, key: str | None) -> str:
    """The ready line, a shell line with curl and one with the OpenAI SDK.

    `key` is the virtual key that was made just now; without one the lines read FACET_API_KEY.
    """
    model = next(name for name, model in policy.models.items() if model.task == "generate")
    lines = [f"ready     {url}", "", "# a shell, with curl:", curl_line(url, model, key), ""]
    lines += ["# a shell, with the OpenAI SDK (pip install openai):", sdk_line(url, model, key), ""]
    if key is None:
        lines += ["# both read the key from FACET_API_KEY; `facet keys create NAME` makes one", ""]
    return "\n".join([*lines, "Ctrl-C ends it when everybody is served; a second one, at once."])


def curl_line(url: str, model: str, key: str | None) -> str:
    """One request by curl."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0})
    bearer = key or "$FACET_API_KEY"
    return (
        f"curl -s {url}/v1/chat/completions -H 'content-type: application/json' "
        f'-H "authorization: Bearer {bearer}" -d {shlex.quote(body)}'
    )


def sdk_line(url: str, model: str, key: str | None) -> str:
    """The same request by the unmodified client."""
    given = f", api_key={json.dumps(key)}" if key else ""
    program = (
        f'from openai import OpenAI; client = OpenAI(base_url="{url}/v1"{given}); '
        f"print(client.chat.completions.create(model={json.dumps(model)}, "
        f'messages=[{{"role": "user", "content": "{QUESTION}"}}], temperature=0).choices[0].message.content)'
    )
    return f"{'' if key else 'OPENAI_API_KEY=$FACET_API_KEY '}python -c {shlex.quote(program)}"
