"""n choices of one prompt: computed once, shared by reference, each with its own stream and end."""

from __future__ import annotations

import pytest

from engines.config import SchedulerConfig

PROMPT = [7, 3, 9, 1, 4, 4, 8, 2, 6, 5]  # two full blocks of four, and two tokens


def test_the_prompt_is_computed_once_and_shared_by_reference(toy) -> None:
    engine = toy.engine()
    engine.core.add_request(toy.request("a", PROMPT, n=3))
    assert [chunk.index for chunk in engine.step()] == [0]
    assert (engine.core.stats().running, engine.core.stats().waiting) == (1, 2)
    assert engine.core.kv.pool.ref_counts[:4] == [1, 1, 1, 0]
    assert [chunk.index for chunk in engine.step()] == [0, 1, 2]
    # The first adds a token; the others share both full blocks and compute the partial one again.
    assert engine.model.batches == [(10, 1, 1), (1 + 2 + 2, 3, 3)]
    assert engine.core.kv.pool.ref_counts[:6] == [3, 3, 1, 1, 1, 0]
    assert (engine.blocks("a", 0), engine.blocks("a", 1), engine.blocks("a", 2)) == ([0, 1, 2], [0, 1, 3], [0, 1, 4])


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_share_even_when_requests_do_not(toy, prefix_cache: bool) -> None:
    engine = toy.engine(prefix_cache=prefix_cache)
    answers = engine.run([toy.request("a", PROMPT, n=4, max_tokens=3)])
    assert sum(tokens for tokens, _, _ in engine.model.batches) == 10 + 3 * 2 + 4 * 2
    assert [answers["a", i].usage.cached_tokens for i in range(4)] == [0, 8, 8, 8]
    assert all(answers["a", i].token_ids == toy.greedy(PROMPT, 3) for i in range(4))


def test_each_choice_has_its_own_random_stream_which_does_not_depend_on_n(toy) -> None:
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
    four = toy.engine().run([toy.request("a", PROMPT, n=4, **options)])
    two = toy.engine().run([toy.request("a", PROMPT, n=2, **options)])
    assert len({tuple(answer.token_ids) for answer in four.values()}) == 4
    for index in range(2):
        assert two["a", index].token_ids == four["a", index].token_ids


def test_more_choices_than_places_take_turns(toy) -> None:
    engine = toy.engine(scheduler=SchedulerConfig(max_batch_tokens=64, max_running=2))
    answers = engine.run([toy.request("a", PROMPT, n=5, max_tokens=4)])
    assert set(answers) == {("a", i) for i in range(5)}
    assert max(sequences for _, sequences, _ in engine.model.batches) == 2


def test_the_others_run_when_the_first_ends_at_once(toy) -> None:
    stop = toy.greedy(PROMPT, 1)[0]
    answers = toy.engine().run([toy.request("a", PROMPT, n=3, stop_token_ids=(stop,))])
    assert [answers["a", i].finish_reason for i in range(3)] == ["stop"] * 3
    one = toy.engine().run([toy.request("a", PROMPT, n=3, max_tokens=1)])
    assert [one["a", i].token_ids for i in range(3)] == [toy.greedy(PROMPT, 1)] * 3


def test_the_others_keep_their_place_in_the_queue(toy) -> None:
    engine = toy.engine(scheduler=SchedulerConfig(max_batch_tokens=64, max_running=1))
    engine.core.add_request(toy.request("a", PROMPT, n=2, max_tokens=2))
    engine.core.add_request(toy.request("b", PROMPT, max_tokens=1))
    engine.run()
    assert engine.steps == [[("a", 0)], [("a", 0)], [("a", 1)], [("a", 1)], [("b", 0)]]


def test_the_others_outlive_a_first_that_is_preempted_in_its_prompt(toy) -> None:
    engine = toy.engine(num_blocks=6, scheduler=SchedulerConfig(max_batch_tokens=4, chunk_tokens=4))
    engine.core.add_request(toy.request("old", [1, 2, 3], max_tokens=12))
    engine.step()
    engine.core.add_request(toy.request("many", PROMPT, n=2, max_tokens=3))
    answers = engine.run()
    assert answers["old", 0].token_ids == toy.greedy([1, 2, 3], 12)
    for index in range(2):
        assert answers["many", index].token_ids == toy.greedy(PROMPT, 3)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_ends_all_choices_whatever_they_do(toy, steps: int) -> None:
    engine = toy.engine()
    engine.core.add_request(toy.request("a", PROMPT, n=3))
    for _ in range(steps):
        engine.step()
    engine.core.abort("a")
    engine.core.check_invariants()
    assert engine.core.kv.pool.num_used == 0
    assert not engine.core.has_work()
    assert engine.core.step() == []
