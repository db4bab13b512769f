"""One choice: thoughts, calls and stop strings told apart, token by token or in any chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.api import Chunk
from engines.text.model import TextModel, load_text
from engines.text.template import ChatTemplate
from routers.choice import Choice, choices_of
from routers.types import CanonicalRequest, Finished, Message, Params, ReasoningDelta, TextDelta, Tool, ToolCallDelta

THINKING = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ tools }}<tool_call><think>"
ANSWER = 'Hm, let me\nthink.</think>\n\nI call.\n<tool_call>{"name": "now", "arguments": {"zone": "CET"}}</tool_call>'


@pytest.fixture
def text(tiny_llama_path: Path) -> TextModel:
    """A tokenizer of bytes under a template that opens the model's thoughts and knows tools."""
    tokenizer = load_text(tiny_llama_path).tokenizer
    return TextModel(tokenizer, ChatTemplate(THINKING, constants={}, special_tokens=[]), eos_token_ids=(0,))


def choice_of(text: TextModel, *, tools: bool = True, **changes: object) -> Choice:
    request = CanonicalRequest(
        request_id="r",
        surface="chat",
        model="m",
        messages=(Message(role="user", content="Hi"),),
        tools=(Tool(name="now", parameters={"type": "object"}),) if tools else (),
        **{key: value for key, value in changes.items() if key == "parallel_tool_calls"},
    )
    params = Params(**{key: value for key, value in changes.items() if key != "parallel_tool_calls"})
    prompt = text.encode_chat([{"role": "user", "content": "Hi"}])
    (choice,) = choices_of(request, [prompt], text, params)
    return choice


def run(choice: Choice, ids: list[int], size: int) -> tuple[str, str, list[tuple[str, str]], Finished | None]:
    """(thoughts, answer, calls, end) of the ids in chunks of `size`."""
    thoughts = answer = ""
    calls: list[list[str]] = []
    for start in range(0, len(ids), size):
        last = start + size >= len(ids)
        chunk = Chunk(request_id="r", token_ids=ids[start : start + size], finish_reason="stop" if last else None)
        for event in choice.feed(chunk):
            if isinstance(event, ReasoningDelta):
                thoughts += event.text
            elif isinstance(event, TextDelta):
                answer += event.text
            elif isinstance(event, ToolCallDelta):
                if event.name is not None:
                    calls.append([event.name, ""])
                calls[event.call][1] += event.arguments
        if choice.finished is not None:
            break
    return thoughts, answer, [(name, arguments) for name, arguments in calls], choice.finished


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_thoughts_answer_and_call(text: TextModel, size: int) -> None:
    choice = choice_of(text)
    thoughts, answer, calls, end = run(choice, text.encode(ANSWER), size)
    assert (thoughts, answer) == ("Hm, let me\nthink.", "I call.")
    assert calls == [("now", '{"zone": "CET"}')]
    assert end == Finished(index=0, finish_reason="tool_calls")
    # Every byte up to the "I" of the answer is a thought's: the tokenizer is bytes.
    assert choice.num_reasoning_tokens == ANSWER.index("I call")
    assert choice.num_tokens == len(ANSWER)


def test_without_tools_a_call_is_text(text: TextModel) -> None:
    _, answer, calls, end = run(choice_of(text, tools=False), text.encode(ANSWER), 3)
    assert answer == ANSWER.partition("</think>\n\n")[2]
    assert calls == []
    assert end == Finished(index=0, finish_reason="stop")


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_second_call_ends_a_choice_that_wants_one(text: TextModel, size: int) -> None:
    ids = text.encode(ANSWER + '<tool_call>{"name": "now"}</tool_call> more')
    choice = choice_of(text, parallel_tool_calls=False)
    _, _, calls, end = run(choice, ids, size)
    assert calls == [("now", '{"zone": "CET"}')]
    assert end == Finished(index=0, finish_reason="tool_calls")
    assert choice.num_tokens < len(ids)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_stop_string_ends_thoughts_too(text: TextModel, size: int) -> None:
    thoughts, answer, _, end = run(choice_of(text, stop=("me\nth",)), text.encode(ANSWER), size)
    assert (thoughts, answer) == ("Hm, let ", "")
    assert end == Finished(index=0, finish_reason="stop", stop_reason="me\nth")
