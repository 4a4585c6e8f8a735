"""Tests finding the running choices by sequence and by request."""

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


def test_all_of_them_may_be_removed_one_after_the_other() -> None:
    choices = RunningChoices()
    for index in range(5):
        choices.add(choice("a", index))
    for one in choices:
        choices.remove(one)
    assert not choices
