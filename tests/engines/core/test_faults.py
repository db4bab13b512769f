"""The fault barrier: a forward or a draw that raises ends the requests that raise alone, and nobody else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engines.core import runner
from engines.layers.forward_batch import ForwardBatch

PROMPT = [7, 3, 9, 1, 4, 4, 8, 2, 6, 5]
EVIL = 49


def poisoned(batch: ForwardBatch) -> None:
    if EVIL in batch.token_ids.tolist():
        raise RuntimeError("this prompt breaks the kernel")


def test_a_poisoned_prompt_ends_alone(toy) -> None:
    engine = toy.engine()
    engine.model.fault = poisoned
    answers = engine.run(
        [toy.request("good", PROMPT), toy.request("evil", [*PROMPT[:8], EVIL]), toy.request("also good", [5] * 6)]
    )
    assert (answers["evil", 0].finish_reason, answers["evil", 0].token_ids) == ("error", [])
    assert answers["evil", 0].usage is not None
    assert answers["good", 0].token_ids == toy.greedy(PROMPT, 8)
    assert answers["also good", 0].token_ids == toy.greedy([5] * 6, 8)
    assert engine.core._metrics.faults == 2  # the batch, then the one


def test_others_lose_no_step(toy) -> None:
    engine = toy.engine()
    engine.model.fault = poisoned
    engine.core.add_request(toy.request("good", PROMPT))
    engine.step()
    engine.core.add_request(toy.request("evil", [EVIL] * 6))
    chunks = engine.step()
    assert {(chunk.request_id, chunk.finish_reason) for chunk in chunks} == {("good", None), ("evil", "error")}


def test_the_engine_survives_when_everything_fails(toy) -> None:
    engine = toy.engine()
    engine.model.fault = failing_times(4)
    answers = engine.run([toy.request(name, PROMPT, n=1) for name in "abc"])
    assert [answers[name, 0].finish_reason for name in "abc"] == ["error"] * 3
    engine.answers.clear()
    assert engine.run([toy.request("a", PROMPT)])["a", 0].token_ids == toy.greedy(PROMPT, 8)


def test_a_passing_fault_is_not_noticed_by_anybody(toy) -> None:
    engine = toy.engine()
    for name in "abc":
        engine.core.add_request(toy.request(name, PROMPT, temperature=1.0, seed=4))
    engine.step()
    engine.model.fault = failing_times(1)
    answers = engine.run()
    calm = toy.engine().run([toy.request(name, PROMPT, temperature=1.0, seed=4) for name in "abc"])
    assert {key: answer.token_ids for key, answer in answers.items()} == {
        key: answer.token_ids for key, answer in calm.items()
    }


def test_a_fault_of_the_sampler_ends_alone(toy, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.engine()
    real = runner.sample

    def sample(logits, rows):
        if any(row.params.seed == 666 for row in rows):
            raise ValueError("cannot draw")
        return real(logits, rows)

    monkeypatch.setattr(runner, "sample", sample)
    answers = engine.run([toy.request("good", PROMPT), toy.request("evil", PROMPT, seed=666)])
    assert answers["evil", 0].finish_reason == "error"
    assert answers["good", 0].token_ids == toy.greedy(PROMPT, 8)


def test_the_first_choice_failing_leaves_the_others_their_own_try(toy) -> None:
    engine = toy.engine()
    engine.model.fault = failing_times(2)  # the batch of one, and that one again
    answers = engine.run([toy.request("a", PROMPT, n=3)])
    assert answers["a", 0].finish_reason == "error"
    assert [answers["a", i].token_ids for i in (1, 2)] == [toy.greedy(PROMPT, 8)] * 2


def test_our_own_broken_invariants_are_not_swallowed(toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only computing is behind the barrier: a fault in bookkeeping must end the engine, not corrupt it."""
    engine = toy.engine()

    def broken(request: object) -> None:
        raise AssertionError("two writers")

    monkeypatch.setattr(engine.core.kv, "publish", broken)
    engine.core.add_request(toy.request("a", PROMPT))
    with pytest.raises(AssertionError, match="two writers"):
        engine.step()


def failing_times(times: int) -> Callable[[ForwardBatch], None]:
    """Raises in the first `times` forwards."""
    left = [times]

    def fault(batch: ForwardBatch) -> None:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("out of memory")

    return fault
