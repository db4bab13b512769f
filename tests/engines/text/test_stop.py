"""Stop strings: first completed wins, whatever the cuts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engines.text.stop import StopMatcher


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first prefix of `text` that ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


@given(
    text=st.text("ab\n", max_size=40),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3, unique=True),
    sizes=st.lists(st.integers(0, 5), max_size=20),
    include=st.booleans(),
)
def test_any_cut_gives_what_the_whole_gives(text: str, stops: list[str], sizes: list[int], include: bool) -> None:
    matcher = StopMatcher(stops, include=include)
    shown = "".join(matcher.feed(piece) for piece in cut(text, sizes)) + matcher.flush()
    assert (shown, matcher.matched) == reference(text, stops, include)


def test_what_may_become_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["END", "\n\n"])
    assert matcher.feed("one\n") == "one"
    assert matcher.feed("two E") == "\ntwo "
    assert matcher.feed("N") == ""
    assert matcher.feed("D more") == ""
    assert matcher.matched == "END"
    assert matcher.feed("after") == ""


def test_what_was_held_back_is_text_when_the_stream_ends() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("the EN") == "the "
    assert matcher.flush() == "EN"
    assert matcher.matched is None
