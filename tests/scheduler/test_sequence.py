"""Tests the chunks that steps are made of, and what they compute."""

from reprise.scheduler.budgets.budget import StepWork
from reprise.scheduler.sequence import Chunk
from tests.conftest import make_sequence


def test_a_chunk_with_the_newest_token_is_the_last():
    sequence = make_sequence("a", 10)
    sequence.computed_tokens = 4
    assert not Chunk(sequence, 5).is_last
    assert Chunk(sequence, 6).is_last


def test_the_work_of_a_step_tells_rows_that_decode_from_prompts():
    decodes, prompt = make_sequence("decodes", 1001), make_sequence("prompt", 3000)
    decodes.computed_tokens, prompt.computed_tokens = 1000, 2000
    # 100 tokens attend to 2,000 and, on average, half of each other; in thousands: 100 * 2.05.
    assert StepWork.of([Chunk(decodes, 1), Chunk(prompt, 100)]) == StepWork(100, 205.0, 1, 1.0)
    assert StepWork.of([]) == StepWork()
