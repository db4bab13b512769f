"""One prompt asked a thousand times, in bad company: every completion is the same to the last bit.

There is no separate deterministic mode: the law that a row's numbers depend on that row alone holds for every request,
so `deterministic: true` costs nothing and promises what is true anyway.
"""

from __future__ import annotations

import random

import pytest

from engines.config import SchedulerConfig

COMPLETIONS = {"int8": 100, "float32": 100}  # a thousand for the format that runs by default
WAVE = 25


@pytest.mark.parametrize("seed", [20261201])
def test_a_thousand_completions_are_one(lab, seed: int) -> None:
    """Waves share a pool too small for them, so requests are preempted; some neighbours are cancelled at any step."""
    draw = random.Random(seed)
    prompt = lab.prompt(3, 44)
    completions = COMPLETIONS.get(lab.model.spec.dtype, 1000)
    expected = lab.alone(prompt, max_tokens=21).bits()
    engine = lab.engine(num_blocks=14, scheduler=SchedulerConfig(max_batch_tokens=96, chunk_tokens=32, max_running=24))
    preempted = cached = cancelled = 0
    for wave in range(completions // WAVE):
        own = [
            # A salt of its own: nothing cached is found. Without one: whatever earlier waves left.
            lab.request(
                f"{wave}-{i}", prompt, max_tokens=21, cache_salt=bytes([i]) if i % 2 else b"", deterministic=True
            )
            for i in range(WAVE)
        ]
        others = [
            lab.request(
                f"n{wave}-{i}",
                lab.prompt(draw.randrange(90), draw.randrange(1, 90)),
                temperature=1.0,
                seed=i,
                max_tokens=40,
            )
            for i in range(draw.randrange(12))
        ]
        together = own + others
        draw.shuffle(together)
        doomed = {request.request_id: draw.randrange(12) for request in others if draw.random() < 0.5}

        def cancel(step: int, doomed: dict[str, int] = doomed) -> None:
            for request_id, when in doomed.items():
                if when == step:
                    engine.abort(request_id)

        answers = lab.ask(engine, together, each_step=cancel)
        cancelled += len(doomed)
        preempted += sum(answer.num_preemptions for answer in answers.values())
        for request in own:
            answer = answers[request.request_id, 0]
            assert answer.bits() == expected, f"seed {seed}: {request.request_id} differs"
            cached += answer.cached_tokens > 0
    assert preempted * 100 > completions, "the pool was large enough: nothing was shown about preemption"
    assert cached * 10 > completions
    assert cancelled * 50 > completions
