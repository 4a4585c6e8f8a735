"""Tests what ends an answer, and what is kept of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.driver import Driver, assert_greedy, generate
from tests.engine.models import RARE, random_ids, vanilla_logits

END = 2  # the model's end-of-text token


def test_the_end_of_text_ends_an_answer(driver: Driver, vanilla: Any) -> None:
    answer = driver.ask("a", random_ids(9, 1), logit_bias={END: 100.0})
    assert (answer.token_ids, answer.finish_reason) == ([END], "stop")
    ignored = driver.ask("b", random_ids(9, 1), logit_bias={END: 100.0}, ignore_eos=True, max_tokens=4)
    assert (ignored.token_ids, ignored.finish_reason) == ([END] * 4, "length")
    late = driver.ask("c", random_ids(9, 1), logit_bias={END: 100.0}, min_tokens=3)
    assert END not in late.token_ids[:3]
    assert (late.token_ids[3:], late.finish_reason) == ([END], "stop")
    # Without the end token the three are what comes next in likelihood: transformers' choice among the others.
    logits = vanilla_logits(vanilla, late.text[:-1])[8:].clone()
    logits[:3, END] = float("-inf")
    assert late.token_ids[:3] == logits[:3].argmax(-1).tolist()


def test_stop_tokens_end_an_answer(driver: Driver, vanilla: Any) -> None:
    whole = generate(vanilla, random_ids(9, 1), 16)
    stop = next(token for place, token in enumerate(whole) if place >= 3 and whole.index(token) == place)
    place = whole.index(stop)
    answer = driver.ask("a", random_ids(9, 1), stop_token_ids=(stop, RARE), ignore_eos=True)
    assert (answer.token_ids, answer.finish_reason) == (whole[: place + 1], "stop")
    later = driver.ask("b", random_ids(9, 1), stop_token_ids=(stop,), ignore_eos=True, min_tokens=place + 1)
    assert later.token_ids[:place] == whole[:place]
    assert later.token_ids[place] != stop


def test_the_window_ends_an_answer(path: Path, vanilla: Any) -> None:
    driver = Driver(path, max_context=64)
    answer = driver.ask("a", random_ids(60, 1), max_tokens=50, ignore_eos=True)
    assert (len(answer.token_ids), answer.finish_reason) == (4, "length")
    assert_greedy(vanilla, answer)
    full = driver.ask("b", random_ids(63, 2), max_tokens=50, ignore_eos=True)
    assert (len(full.token_ids), full.finish_reason) == (1, "length")


@pytest.mark.parametrize("keep", [0, 1, 5, 9, 10])
def test_a_stop_string_keeps_what_stands_before_it(driver: Driver, vanilla: Any, keep: int) -> None:
    first = driver.submit("a", random_ids(30, 1), session="s", max_tokens=50, ignore_eos=True)
    for _ in range(10):
        driver.step()
    assert len(first.token_ids) == 10
    driver.engine.finish("a", 0, keep)
    driver.check()
    assert not driver.engine.has_work()
    kept = first.text[: 30 + keep]
    onward = driver.ask("b", kept + random_ids(6, 2), session="s")
    assert onward.cached == min(30 + keep, 39)  # the last of ten tokens has no KV yet
    assert_greedy(vanilla, onward)


def test_each_answer_that_came_to_an_end_tells_the_forecast_its_length(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a token, the limit or a stop string ended it; an answer that was aborted says nothing of lengths."""
    lengths: list[int] = []
    monkeypatch.setattr(driver.scheduler, "completed", lambda sequence: lengths.append(sequence.output_tokens))
    driver.ask("limit", random_ids(9, 1), ignore_eos=True, max_tokens=4)
    driver.ask("token", random_ids(9, 1), logit_bias={END: 100.0})
    for name, end in (("string", lambda: driver.engine.finish("string", 0, 2)), ("aborted", None)):
        driver.submit(name, random_ids(30, 1), max_tokens=50, ignore_eos=True)
        for _ in range(4):
            driver.step()
        end() if end else driver.engine.abort("aborted")
    assert lengths == [4, 1, 4]


@pytest.mark.parametrize("ends_early", [None, 0, 1])
def test_a_session_stands_where_its_first_choice_stopped(driver: Driver, ends_early: int | None) -> None:
    """Clients go on with the first of several answers. A session that stood at another one would leave that one on disk
    and tell other servers of it."""
    options: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "seed": 5, "session": "s"}
    first = driver.submit("a", random_ids(40, 1), choices=2, max_tokens=70, **options)
    second = driver.answers["a", 1]
    while len(second.token_ids) < 45:
        driver.step()
    if ends_early is not None:
        driver.engine.finish("a", ends_early, 45)
    driver.run()
    session = driver.cache.sessions.contexts["t", "", "s"]
    assert first.token_ids != second.token_ids
    assert [row.key for row in driver.cache.tiers.table if len(row.token_ids) < 32] == [session.open_key]
    assert list(session.open_tokens) == first.text[:-1][len(first.text[:-1]) // 32 * 32 :]
    again = driver.ask("b", [*first.text, 7], **options)
    assert again.cached == len(first.text) - 1


class Poison:
    """A forward hook that makes NaN of what a module computes for the rare token."""

    def __init__(self, module: Any) -> None:
        self._handle = module.register_forward_hook(self)

    def __call__(self, module: Any, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        return torch.where((args[0] == RARE)[..., None], float("nan"), out)

    def remove(self) -> None:
        self._handle.remove()


@pytest.mark.parametrize("poisoned_at", [3, 38, 69])
def test_a_row_without_numbers_fails_alone(path: Path, vanilla: Any, poisoned_at: int) -> None:
    """Nothing of it is found again: the same prompt is right as soon as the model is."""
    driver = Driver(path, step_tokens=32)
    poison = Poison(driver.model.get_input_embeddings())
    prompt = random_ids(70, 1)
    prompt[poisoned_at] = RARE
    others = [driver.submit(f"other{i}", random_ids(30, 10 + i), ignore_eos=True) for i in range(3)]
    bad = driver.submit("bad", prompt, session="s", ignore_eos=True)
    driver.run()
    assert (bad.finish_reason, bad.error_code, bad.token_ids) == ("error", "internal_error", [])
    for other in others:
        assert_greedy(vanilla, other)
    poison.remove()
    for session in ("s", "another"):
        again = driver.ask(f"again {session}", [*prompt, 7], session=session, ignore_eos=True)
        assert_greedy(vanilla, again)


def test_a_row_that_fails_on_anothers_blocks_heals(path: Path, vanilla: Any) -> None:
    """A prefill of NaN was dropped before anybody saw its logits: its blocks are found, fail once, and are gone."""
    driver = Driver(path, step_tokens=100)
    poison = Poison(driver.model.get_input_embeddings())
    prompt = [RARE, *random_ids(200, 2)]
    driver.submit("dropped", prompt, session="s")
    driver.step()
    driver.engine.abort("dropped")
    poison.remove()
    assert driver.ask("fails", prompt, session="s").error_code == "internal_error"
    healed = driver.ask("heals", prompt, session="s")
    assert healed.cached == 0
    assert_greedy(vanilla, healed)
