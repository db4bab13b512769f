"""No optimisation and no neighbour changes an answer: the toy model reads back every slot, so any slip would show."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engines.config import SchedulerConfig


def prompt_of(number: int, length: int) -> list[int]:
    return [(number * 31 + i * 7 + i * i) % 48 for i in range(length)]


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 4, 5, 7, 16, 31])
def test_chunked_is_whole(toy, chunk_tokens: int) -> None:
    prompt = prompt_of(1, 33)
    engine = toy.engine(scheduler=SchedulerConfig(max_batch_tokens=32, chunk_tokens=chunk_tokens))
    assert engine.run([toy.request("a", prompt)])["a", 0].token_ids == toy.greedy(prompt, 8)


@pytest.mark.parametrize("block_size", [1, 2, 8, 16])
def test_block_sizes_do_not_matter(toy, block_size: int) -> None:
    prompt = prompt_of(2, 21)
    engine = toy.engine(block_size=block_size)
    for name in "abc":
        assert engine.run([toy.request(name, prompt)])[name, 0].token_ids == toy.greedy(prompt, 8)


@pytest.mark.parametrize("shared", [0, 1, 3, 4, 5, 12, 16, 20])
def test_a_prefix_hit_is_a_miss(toy, shared: int) -> None:
    engine = toy.engine()
    first, second = prompt_of(1, 20), [*prompt_of(1, 20)[:shared], *prompt_of(2, 9)]
    engine.run([toy.request("a", first)])
    answer = engine.run([toy.request("b", second)])["b", 0]
    assert answer.usage.cached_tokens == shared // 4 * 4
    assert answer.token_ids == toy.greedy(second, 8)


def test_preempted_is_uninterrupted(toy) -> None:
    engine = toy.engine(num_blocks=12)
    prompts = {name: prompt_of(number, 9) for number, name in enumerate("abcde")}
    answers = engine.run([toy.request(name, prompt, max_tokens=20) for name, prompt in prompts.items()])
    assert engine.core.scheduler.num_preemptions >= 2
    assert sum(answer.timings.num_preemptions for answer in answers.values()) == engine.core.scheduler.num_preemptions
    for name, prompt in prompts.items():
        assert answers[name, 0].token_ids == toy.greedy(prompt, 20)


@pytest.mark.parametrize("neighbours", range(1, 17))
def test_alone_is_among_neighbours(toy, neighbours: int) -> None:
    options = {"temperature": 0.9, "seed": 11, "max_tokens": 10}
    alone = toy.engine().run([toy.request("me", prompt_of(5, 13), **options)])["me", 0].token_ids
    engine = toy.engine(num_blocks=40)
    for number in range(neighbours):
        prompt = prompt_of(number, 3 + number)
        engine.core.add_request(toy.request(f"other-{number}", prompt, n=1 + number % 2, temperature=1.0, max_tokens=9))
    engine.step()
    answers = engine.run([toy.request("me", prompt_of(5, 13), **options)])
    assert answers["me", 0].token_ids == alone


class LifeMachine(RuleBasedStateMachine):
    """Requests come, are cancelled, preempt each other and share prefixes in a pool that is too small for all.

    After every action the invariants hold; what ends by itself has said exactly what the oracle says.
    """

    def __init__(self, toy) -> None:
        super().__init__()
        self.toy = toy
        budget = SchedulerConfig(max_batch_tokens=9, chunk_tokens=5, max_running=4, max_waiting=100)
        self.engine = toy.engine(num_blocks=9, block_size=4, scheduler=budget)
        self.prompts: dict[str, list[int]] = {}
        self.aborted: set[str] = set()

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        max_tokens=st.integers(1, 9),
        n=st.integers(1, 3),
        priority=st.integers(0, 1),
        salt=st.sampled_from([b"", b"other"]),
    )
    def arrive(self, tokens: list[int], max_tokens: int, n: int, priority: int, salt: bytes) -> None:
        name = f"r{len(self.prompts)}"
        self.prompts[name] = tokens
        self.engine.core.add_request(
            self.toy.request(name, tokens, max_tokens=max_tokens, n=n, priority=priority, cache_salt=salt)
        )

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            chunks = self.engine.step()
            assert self.aborted.isdisjoint(chunk.request_id for chunk in chunks)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        self.engine.core.abort(name)
        self.aborted.add(name)
        assert not any(request_id == name for request_id, _ in self.engine.running() + self.engine.waiting())

    @invariant()
    def holds_together(self) -> None:
        self.engine.core.check_invariants()
        for (name, _), answer in self.engine.answers.items():
            assert answer.token_ids == self.toy.greedy(self.prompts[name], len(answer.token_ids))
            assert answer.finish_reason in (None, "length")

    def teardown(self) -> None:
        self.engine.run()
        for name in self.prompts:
            choices = [answer for (request_id, _), answer in self.engine.answers.items() if request_id == name]
            assert name in self.aborted or {answer.finish_reason for answer in choices} == {"length"}


def test_any_life_of_an_engine_gives_the_oracles_answers(toy) -> None:
    run_state_machine_as_test(
        lambda: LifeMachine(toy), settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )


@pytest.mark.parametrize("status", ["waiting", "chunk", "prompt computed", "decoding", "held", "preempted"])
def test_a_cancelled_request_frees_its_kv_at_once(toy, status: str) -> None:
    engine = toy.engine(num_blocks=10, scheduler=SchedulerConfig(max_batch_tokens=8, chunk_tokens=8, max_running=2))
    engine.core.add_request(toy.request("old", prompt_of(1, 4), max_tokens=30))
    engine.core.add_request(toy.request("me", prompt_of(2, 12), max_tokens=30, n=2 if status == "held" else 1))
    if status == "waiting":
        engine.core.add_request(toy.request("you", prompt_of(3, 8)))
    steps = {"waiting": 0, "chunk": 1, "held": 1, "prompt computed": 2, "decoding": 4}.get(status)
    if steps is None:
        while engine.core.scheduler.num_preemptions == 0:
            engine.step()
    else:
        for _ in range(steps):
            engine.step()
    engine.core.abort("me")
    engine.core.check_invariants()
    held = sum(len(request.block_ids) for request in engine.core.scheduler.running)
    assert engine.core.kv.pool.num_used == held
    assert ("me", 0) not in engine.running() + engine.waiting()
    assert engine.core.stats().aborts_total == 1
    assert "me" not in {chunk.request_id for chunk in engine.step()}
    engine.run()
    assert engine.answers["old", 0].token_ids == toy.greedy(prompt_of(1, 4), 30)
