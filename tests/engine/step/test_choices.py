"""Tests finding the running choices by sequence and by request."""

import pytest

from reprise.cache.stats import TokensBySource
from reprise.engine.step.choices import RunningChoice, RunningChoices
from reprise.scheduler.sequence import Sequence
from tests.engine.scripted_engine import submit


def choice(request_id: str, index: int) -> RunningChoice:
    request = submit(request_id)
    sequence = Sequence(
        request_id=f"{request_id}/{index}",
        tenant="",
        session_id="",
        sampling=request.sampling,
        arrived_s=0.0,
        token_ids=list(request.token_ids),
        prompt_tokens=len(request.token_ids),
    )
    return RunningChoice(
        sequence=sequence,
        request_id=request_id,
        index=index,
        seed=0,
        penalties=None,
        end_ids=(),
        may_truncate=False,
    )


def test_a_request_is_known_as_long_as_one_of_its_choices_is() -> None:
    choices = RunningChoices()
    first, second, other = choice("a", 0), choice("a", 1), choice("b", 0)
    for one in (first, second, other):
        choices.add(one)
    assert choices.of_request("a") == [first, second]
    choices.remove(first)
    assert (choices.of_request("a"), choices.get("a/0"), choices["a/1"]) == ([second], None, second)
    choices.remove(second)
    assert (choices.of_request("a"), list(choices), len(choices)) == ([], [other], 1)


@pytest.mark.parametrize(("load_s", "saved_ms"), [(0.0, 3000.0), (0.5, 2500.0), (3.0, 0.0), (4.0, 0.0)])
def test_loading_takes_its_part_of_what_reuse_saved(load_s: float, saved_ms: float) -> None:
    one = choice("a", 0)
    one.report = TokensBySource(
        prompt_tokens=8, history_tokens=7, hbm_tokens=7, dram_tokens=0, disk_tokens=0, truncated_tokens=0,
        shifted_tokens=0, miss_reasons={"new": 1},
    )  # fmt: skip
    one.reuse_s, one.load_wait_s = 3.0, load_s
    first = one.output([5], None, 10.0)
    one.load_wait_s += 1.0  # it was preempted and loaded again, long after its first token
    last = one.output([6], None, 11.0, "stop", one.timings(11.0))
    assert first.timings is not None
    assert last.timings is not None
    assert (first.timings.saved_ms, last.timings.saved_ms) == (saved_ms, saved_ms)


def test_all_of_them_may_be_removed_one_after_the_other() -> None:
    choices = RunningChoices()
    for index in range(5):
        choices.add(choice("a", index))
    for one in choices:
        choices.remove(one)
    assert not choices
