"""The law of the engine on a real architecture: no optimisation and no neighbour changes an answer, to the last bit."""

from __future__ import annotations

import pytest

from engines.config import SchedulerConfig

SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 42, "max_tokens": 16}


@pytest.mark.parametrize("chunk_tokens", [1, 5, 16, 31, 64])
def test_chunked_is_whole(lab, chunk_tokens: int) -> None:
    prompt = lab.prompt(1, 100)
    engine = lab.engine(scheduler=SchedulerConfig(chunk_tokens=chunk_tokens))
    answer = lab.ask(engine, [lab.request("me", prompt)])["me", 0]
    assert answer.bits() == lab.alone(prompt).bits()


def test_chunked_is_whole_across_key_tiles(lab) -> None:
    """Attention walks keys in tiles of 512: chunks that end before, at and behind such a border."""
    prompt = lab.prompt(2, 1050)
    whole = lab.ask(
        lab.engine(scheduler=SchedulerConfig(max_batch_tokens=1200, chunk_tokens=1200)),
        [lab.request("me", prompt, max_tokens=4)],
    )["me", 0]
    for chunk_tokens in (511, 512, 513, 300):
        engine = lab.engine(scheduler=SchedulerConfig(max_batch_tokens=600, chunk_tokens=chunk_tokens))
        answer = lab.ask(engine, [lab.request("me", prompt, max_tokens=4)])["me", 0]
        assert answer.bits() == whole.bits(), chunk_tokens


@pytest.mark.parametrize("shared", [15, 16, 17, 64, 95])
def test_a_prefix_hit_is_a_miss(lab, shared: int) -> None:
    first, second = lab.prompt(1, 100), [*lab.prompt(1, 100)[:shared], *lab.prompt(2, 20)]
    engine = lab.engine()
    lab.ask(engine, [lab.request("first", first)])
    answer = lab.ask(engine, [lab.request("me", second)])["me", 0]
    assert answer.cached_tokens == shared // 16 * 16
    assert answer.bits() == lab.alone(second).bits()


def test_a_hit_on_generated_tokens_is_a_miss(lab) -> None:
    """A second turn finds blocks that were computed one token at a time."""
    engine = lab.engine()
    first = lab.ask(engine, [lab.request("first", lab.prompt(3, 30), max_tokens=40)])["first", 0]
    conversation = [*lab.prompt(3, 30), *first.token_ids, *lab.prompt(4, 7)]
    answer = lab.ask(engine, [lab.request("me", conversation)])["me", 0]
    assert answer.cached_tokens == 64
    assert answer.bits() == lab.alone(conversation).bits()


def test_preempted_is_uninterrupted(lab) -> None:
    prompts = {f"r{number}": lab.prompt(number, 40 + number) for number in range(6)}
    engine = lab.engine(num_blocks=18)
    answers = lab.ask(engine, [lab.request(name, prompt, max_tokens=60) for name, prompt in prompts.items()])
    assert engine.scheduler.num_preemptions >= 2
    assert any(answer.num_preemptions for answer in answers.values())
    for name, prompt in prompts.items():
        assert answers[name, 0].bits() == lab.alone(prompt, max_tokens=60).bits(), name


@pytest.mark.parametrize("neighbours", range(1, 17))
def test_alone_is_among_neighbours(lab, neighbours: int) -> None:
    prompt = lab.prompt(100, 37)
    engine = lab.engine(num_blocks=300)
    others = [
        lab.request(f"other-{number}", lab.prompt(number, 3 + 11 * number), temperature=1.0, seed=number, max_tokens=30)
        for number in range(neighbours)
    ]

    def arrive(step: int) -> None:
        if step == 2:
            engine.add_request(lab.request("me", prompt, **SAMPLED))

    answers = lab.ask(engine, others, each_step=arrive)
    assert answers["me", 0].bits() == lab.alone(prompt, **SAMPLED).bits()


def test_every_neighbour_is_as_it_were_alone(lab) -> None:
    """Not only one of the batch: each of twelve, of awkward lengths."""
    prompts = {f"r{number}": lab.prompt(number, length) for number, length in enumerate([1, 2, 3, 15, 16, 17, 31, 33])}
    answers = lab.ask(lab.engine(), [lab.request(name, prompt, **SAMPLED) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert answers[name, 0].bits() == lab.alone(prompt, **SAMPLED).bits(), name


def test_choices_are_requests_of_their_own(lab) -> None:
    """n choices share the prompt's blocks; each is what it would be in a request with fewer choices."""
    prompt = lab.prompt(5, 50)
    four = lab.ask(lab.engine(), [lab.request("me", prompt, n=4, **SAMPLED)])
    two = lab.ask(lab.engine(), [lab.request("me", prompt, n=2, **SAMPLED)])
    assert four["me", 0].bits() == lab.alone(prompt, **SAMPLED).bits()
    assert four["me", 1].bits() == two["me", 1].bits()
    assert len({tuple(answer.token_ids) for answer in four.values()}) == 4


@pytest.mark.parametrize("emitted", [1, 7, 15])
def test_a_stream_that_moves_to_another_replica_is_unmoved(lab, emitted: int) -> None:
    prompt = lab.prompt(6, 45)
    whole = lab.alone(prompt, **SAMPLED)
    rest = lab.alone([*prompt, *whole.token_ids[:emitted]], num_emitted_tokens=emitted, **SAMPLED)
    assert rest.token_ids == whole.token_ids[emitted:]
    assert rest.logprobs == whole.logprobs[emitted:]


def test_cancels_and_preemptions_around_it_change_nothing(lab) -> None:
    prompt = lab.prompt(8, 33)
    engine = lab.engine(num_blocks=14, scheduler=SchedulerConfig(max_batch_tokens=48, chunk_tokens=20))

    def disturb(step: int) -> None:
        if step < 150 and step % 7 == 1:
            engine.add_request(lab.request(f"o{step}", lab.prompt(step, 20 + step % 30), max_tokens=70))
        if step > 40 and step % 7 == 5:
            engine.abort(f"o{step - 32}")

    me = lab.request("me", prompt, priority=1, max_tokens=60)
    answers = lab.ask(engine, [me], each_step=disturb)
    assert answers["me", 0].num_preemptions >= 1
    assert answers["me", 0].bits() == lab.alone(prompt, max_tokens=60).bits()


def test_scores_are_the_logprobs_of_the_same_tokens(lab) -> None:
    prompt = lab.prompt(9, 40)
    top = lab.alone(prompt, max_tokens=1, logprobs=5).logprobs[0].top
    labels = tuple(token_id for token_id, _ in top)
    scored = lab.alone(prompt, max_tokens=1, logprobs=0, logprob_token_ids=labels).logprobs[0].top
    assert dict(scored) == dict(top)
