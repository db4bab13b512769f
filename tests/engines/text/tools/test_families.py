"""Each family's own words to calls: by hand for what the format says, by Hypothesis for where a stream is cut."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.text.scanner import CallArguments, CallStart, Content, Piece, Reasoning
from engines.text.tools.base import Offered, tool_parser
from engines.text.tools.registry import FAMILIES, family_of

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array"},
        "exact": {"type": "boolean"},
    },
}
OFFERED = Offered({"weather": WEATHER, "now": {"type": "object", "properties": {}}})
PARIS = {"city": "Paris", "days": 3}
BAR = "｜"


@dataclass
class Read:
    """What a client would put together from the pieces."""

    content: str
    reasoning: str
    calls: list[tuple[str, Any]]
    ids: list[str | None]


def read(family: str, *chunks: str, offered: Offered = OFFERED) -> Read:
    parser = tool_parser(FAMILIES[family].read, offered)
    pieces: list[Piece] = []
    for chunk in chunks:
        pieces += parser.feed(chunk)
    pieces += parser.close()
    names: dict[int, str] = {}
    texts: dict[int, str] = {}
    ids: list[str | None] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.index == len(names), "calls are numbered as they come"
            names[piece.index], texts[piece.index] = piece.name, ""
            ids.append(piece.id)
        elif isinstance(piece, CallArguments):
            texts[piece.index] += piece.text  # KeyError: arguments before their call
    return Read(
        "".join(piece.text for piece in pieces if isinstance(piece, Content)),
        "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
        [(names[index], json.loads(texts[index])) for index in names],
        ids,
    )


def call(arguments: str = '{"city": "Paris", "days": 3}', name: str = "weather", key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


ARGS = '{"city": "Paris", "days": 3}'
CALL, SEPARATOR, CALL_END = (f"<{BAR}tool▁{part}{BAR}>" for part in ("call▁begin", "sep", "call▁end"))
V3 = f"{CALL}function{SEPARATOR}weather\n```json\n{ARGS}\n```{CALL_END}"
V31 = f"{CALL}weather{SEPARATOR}{ARGS}{CALL_END}"
BEGIN, END = f"<{BAR}tool▁calls▁begin{BAR}>", f"<{BAR}tool▁calls▁end{BAR}>"
KIMI = f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{ARGS}<|tool_call_end|>"
QWEN = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
HARMONY = f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGS}<|call|>"
# family, text, content that is left, calls
ONE, TWO = [("weather", PARIS)], [("weather", PARIS), ("now", {})]
EXAMPLES = [
    ("hermes", f"<tool_call>\n{call()}\n</tool_call>", "", ONE),
    (
        "hermes",
        f"Let me see.\n<tool_call>\n{call()}\n</tool_call>\n<tool_call>{call('{}', 'now')}</tool_call>",
        "Let me see.",
        TWO,
    ),
    ("hermes", f"<tool_call>{call()}</tool_call> done", " done", ONE),
    ("hermes", f"<tool_call>{call()}", "", ONE),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris", "days": 3}, "name": "weather"}</tool_call>', "", ONE),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3}"}</tool_call>',
        "",
        ONE,
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    ("qwen3_xml", QWEN, "", ONE),
    ("qwen3_xml", f"I look.\n{QWEN}\n{QWEN}", "I look.", ONE + ONE),
    ("llama3_json", call(key="parameters"), "", ONE),
    ("llama3_json", f"<|python_tag|>{call(key='parameters')}; {call('{}', 'now', 'parameters')}", "", TWO),
    ("llama3_json", '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    ("mistral", f"[TOOL_CALLS][{call()}, {call('{}', 'now')}]", "", TWO),
    (
        "mistral",
        '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{}',
        "",
        TWO,
    ),
    ("mistral", '[TOOL_CALLS]weather{"city": "Paris", "days": 3}', "", ONE),
    ("pythonic", "[weather(city='Paris', days=3), now()]", "", TWO),
    ("pythonic", "[weather('Paris', 3)]", "", ONE),
    (
        "pythonic",
        "[weather(city='a) b', tags=['x', {'y': None}], exact=True)]",
        "",
        [("weather", {"city": "a) b", "tags": ["x", {"y": None}], "exact": True})],
    ),
    ("pythonic", "[1, 2, 3] is a list", "[1, 2, 3] is a list", []),
    ("deepseek", f"Sure.{BEGIN}{V3}{END}", "Sure.", ONE),
    ("deepseek", f"{BEGIN}{V31}{V31}{END}", "", ONE + ONE),
    ("kimi", f"<|tool_calls_section_begin|>{KIMI}<|tool_calls_section_end|>", "", ONE),
    ("glm", f"Looking.\n{GLM}", "Looking.", ONE),
    ("glm", "<tool_call>now</tool_call>", "", [("now", {})]),
    ("gemma", '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>', "", ONE),
    ("gemma", "<start_function_call>call:weather{city:<escape>Paris<escape>,days:3}<end_function_call>", "", ONE),
    (
        "gemma",
        '<|tool_call>call:weather{tags:[<|"|>a,b<|"|>,{k:true}],days:-1}<tool_call|>',
        "",
        [("weather", {"tags": ["a,b", {"k": True}], "days": -1})],
    ),
    ("harmony", f"<|channel|>analysis<|message|>Hm.<|end|>{HARMONY}", "", ONE),
    ("harmony", "<|channel|>final<|message|>Hello<|return|>", "Hello", []),
    ("granite", f"<|tool_call|>[{call()}]", "", ONE),
    ("granite", f"<tool_call>[{call()},{call('{}', 'now')}]", "", TWO),
    ("phi", f"functools[{call()}]", "", ONE),
    ("phi", f"<|tool_call|>[{call()}]<|/tool_call|>", "", ONE),
    ("xlam", f"[{call()}, {call('{}', 'now')}]", "", TWO),
    ("xlam", f"Here:\n```json\n[{call()}]\n```", "Here:", ONE),
    ("xlam", '```json\n{"name": "Ada"}\n```', '```json\n{"name": "Ada"}\n```', []),
]


@pytest.mark.parametrize(("family", "text", "content", "calls"), EXAMPLES)
def test_the_formats(family: str, text: str, content: str, calls: list[Any]) -> None:
    for chunks in ([text], list(text)):
        found = read(family, *chunks)
        assert (found.content, found.calls) == (content, calls)


def test_every_family_has_an_example() -> None:
    assert {family for family, *_ in EXAMPLES} == set(FAMILIES)


def test_ids_are_those_of_the_model() -> None:
    assert read("kimi", KIMI).ids == ["functions.weather:0"]
    assert read("mistral", "[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{}").ids == ["abc123XYZ"]
    assert read("hermes", f"<tool_call>{call()}</tool_call>").ids == [None]


def test_harmony_reads_thoughts_too() -> None:
    found = read(
        "harmony", "<|channel|>analysis<|message|>Let me\nthink<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    )
    assert (found.reasoning, found.content) == ("Let me\nthink", "Yes")


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "functools",
        "<|tool_call|>",
        "<|python_tag|>",
        "```json",
        "```",
        "{",
        "}",
        "[",
        "]",
        '"',
        ":",
        ",",
        ";",
        "\\",
        "(",
        ")",
        "=",
        " ",
        "\n",
        "name",
        '"name": "weather"',
        '"arguments": ',
        call(),
        "weather",
        "1.5",
        "-",
        "true",
        "nul",
        "\\u12",
        "é",
        "<function=",
        ">",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        '<|"|>',
        "<|tool_call>",
        "<tool_call|>",
        "call:now",
        "<escape>",
        BEGIN,
        END,
        V3,
        V31,
        KIMI,
        QWEN,
        GLM,
        HARMONY,
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "to=functions.now",
        "[now()]",
        "\t",
    ]
)


@given(st.sampled_from(sorted(FAMILIES)), st.lists(FRAGMENTS, max_size=12).map("".join), st.data())
def test_any_chunking_gives_what_the_whole_gives(family: str, text: str, data: st.DataObject) -> None:
    """Whatever a model writes: nothing is raised, arguments are valid JSON, and cuts change nothing."""
    whole = read(family, text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(family, *chunks) == whole
    assert read(family, *text) == whole
    if not whole.calls and family not in ("harmony",):
        assert whole.content == text, "what is no call is content to the letter"


@given(st.sampled_from([e for e in EXAMPLES if e[3]]), st.data())
def test_a_cut_off_answer_still_has_valid_arguments(
    example: tuple[str, str, str, list[Any]], data: st.DataObject
) -> None:
    family, text, _, calls = example
    found = read(family, text[: data.draw(st.integers(0, len(text)))])
    assert len(found.calls) <= len(calls)
    for (name, values), (true_name, true_values) in zip(found.calls, calls, strict=False):
        assert name == true_name
        assert set(values) <= set(true_values)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3),
    ),
    st.booleans(),
)
def test_any_json_comes_through(value: Any, ascii_: bool) -> None:
    arguments = {"value": value}
    text = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_)
    found = read("hermes", f"<tool_call>{text}</tool_call>", offered=Offered())
    assert found.calls == [("f", arguments)]


def test_a_large_argument_is_linear() -> None:
    """A megabyte in one piece, and in many: neither takes quadratic time (the suite's own timeout would tell)."""
    text = f"<tool_call>{call(json.dumps({'city': 'x' * 300_000}))}</tool_call>"
    assert read("hermes", text).calls == [("weather", {"city": "x" * 300_000})]
    assert len(read("hermes", "y" * 1_000_000).content) == 1_000_000


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("... <tool_call> ...", "hermes"),
        ("<tool_call>{{ name }}<arg_key>", "glm"),
        ("<tool_call><function=", "qwen3_xml"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("<|channel|>analysis", "harmony"),
        ("nothing at all", "xlam"),
    ],
)
def test_the_template_tells_the_family(template: str, family: str) -> None:
    assert family_of(template) == family
