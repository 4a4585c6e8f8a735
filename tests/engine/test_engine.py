"""Tests the whole engine on a tiny model: its texts must equal those of transformers, whatever else happens."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from reprise.kernels.attention import BACKENDS
from reprise.kernels.attention.torch_cpu import TorchAttention
from tests.engine.driver import Answer, Driver, assert_greedy, generate
from tests.engine.models import random_ids, vanilla_logits

END = 2  # the model's end-of-text token


# --- reuse ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["prefix", "recompute"])
def test_a_conversation_is_transformers_own_text(path: Path, vanilla: Any, mode: str) -> None:
    """Every turn computes its new tokens and the last one of the answer before, whose KV nobody needed so far."""
    driver = Driver(path, cache_mode=mode, step_tokens=48)
    history: list[int] = []
    for turn, (question, answer_tokens) in enumerate([(40, 9), (1, 23), (70, 1), (5, 40)]):
        prompt = history + random_ids(question, turn)
        answer = driver.ask(f"r{turn}", prompt, session="s", max_tokens=answer_tokens, ignore_eos=True)
        assert answer.token_ids == generate(vanilla, prompt, answer_tokens)
        assert answer.finish_reason == "length"
        report = answer.report
        assert report is not None
        known = max(0, len(history) - 1)
        assert (report.prompt_tokens, report.history_tokens) == (len(prompt), known)
        assert report.hbm_tokens == (known if mode == "prefix" else 0)
        assert report.computed_tokens == len(prompt) - report.hbm_tokens
        lost = {"disabled": known} if known and mode == "recompute" else {}
        assert report.miss_reasons == {**lost, "new": len(prompt) - known}
        history = answer.text


@pytest.mark.parametrize("mode", ["prefix", "recompute"])
def test_a_turn_says_what_reuse_saved(path: Path, mode: str) -> None:
    driver = Driver(path, cache_mode=mode)
    first = driver.ask("first", random_ids(200, 1), session="s", max_tokens=4, ignore_eos=True)
    second = driver.ask("second", [*first.text, *random_ids(20, 2)], session="s", max_tokens=4, ignore_eos=True)
    said = [[timings.saved_ms for timings in answer.timings if timings is not None] for answer in (first, second)]
    assert said[0] == [0.0, 0.0], "with the first token and with the last"
    assert said[1][0] == said[1][1]
    assert (said[1][0] > 0) == (mode == "prefix")


def test_a_crowd_of_conversations(path: Path, vanilla: Any) -> None:
    """Sixteen sessions, three turns each, in chunks, eight at once, each turn as soon as the one before has ended."""
    driver = Driver(path, step_tokens=48, max_queued=16)
    rng = random.Random(0)
    system = random_ids(45, 99)
    latest: dict[int, Answer] = {}
    turns = dict.fromkeys(range(16), 0)
    while latest.keys() != turns.keys() or any(turns[i] < 3 or not latest[i].finish_reason for i in turns):
        for i in rng.sample(sorted(turns), 16):
            if turns[i] < 3 and (i not in latest or latest[i].finish_reason) and rng.random() < 0.4:
                history = latest[i].text if i in latest else system
                prompt = history + random_ids(rng.randint(1, 30), 100 * i + turns[i])
                latest[i] = driver.submit(
                    f"{i}.{turns[i]}", prompt, session=str(i), max_tokens=rng.randint(1, 12), ignore_eos=True
                )
                turns[i] += 1
        if driver.engine.has_work():
            driver.step()
    driver.run()
    for (request_id, _), answer in driver.answers.items():
        assert_greedy(vanilla, answer)
        session, turn = map(int, request_id.split("."))
        if turn:
            before = driver.answers[f"{session}.{turn - 1}", 0]
            assert answer.cached == len(before.text) - 1


def test_what_others_said_is_shared_in_whole_blocks(driver: Driver, vanilla: Any) -> None:
    system = random_ids(70, 1)
    driver.ask("a", system + random_ids(20, 2))
    other = driver.ask("b", system + random_ids(20, 3))
    # 105 rows are computed: three whole blocks, of which the second session shares 70 tokens, two blocks and 6 rows.
    assert other.cached == 70
    assert_greedy(vanilla, other)
    # Rows 96 to 104 are an open block, private to its session.
    assert driver.ask("c", [*driver.answers["a", 0].text, 7]).cached == 96


@pytest.mark.parametrize("changes", [{"tenant": "other"}, {"salt": "pepper"}])
def test_nothing_is_shared_across_tenants_and_salts(driver: Driver, vanilla: Any, changes: dict[str, str]) -> None:
    prompt = random_ids(80, 1)
    driver.ask("a", prompt, session="s")
    answer = driver.ask("b", prompt, session="s", **changes)
    assert answer.cached == 0
    assert_greedy(vanilla, answer)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("place", [1, 31, 32, 50, 64, 70, 83, 84])
@pytest.mark.parametrize("same_session", [True, False])
def test_a_history_that_forks(driver: Driver, vanilla: Any, place: int, same_session: bool) -> None:
    """Edited at `place`: what stands before it is reused, of another session's open block nothing."""
    first = driver.ask("a", random_ids(60, 1), session="s", max_tokens=25, ignore_eos=True)
    assert len(first.text) == 85  # 84 rows with KV: two blocks and an open one of 20 rows
    edited = [*first.text[:place], 3 + first.text[place] % 190, *random_ids(30, 2)]
    fork = driver.ask("b", edited, session="s" if same_session else "other")
    assert fork.cached == (place if same_session else min(place, 64))
    assert_greedy(vanilla, fork)
    # The first branch goes on as if nothing had happened.
    onward = driver.ask("c", first.text + random_ids(5, 3), session="s")
    assert_greedy(vanilla, onward)
    assert onward.cached >= 64


def test_branches_that_run_at_once(driver: Driver, vanilla: Any) -> None:
    first = driver.ask("a", random_ids(40, 1), session="s", max_tokens=30, ignore_eos=True)
    branches = [
        driver.submit(f"b{i}", first.text[: 69 - i] + random_ids(20 + i, i), session="s", max_tokens=20)
        for i in range(5)
    ]  # fmt: skip
    driver.run()
    for branch in branches:
        assert_greedy(vanilla, branch)


def test_a_prompt_of_one_token(driver: Driver, vanilla: Any) -> None:
    for name in ("a", "b"):
        answer = driver.ask(name, [5], session="s", max_tokens=40, ignore_eos=True)
        assert answer.cached == 0
        assert_greedy(vanilla, answer)


def test_an_answer_that_is_made_again(driver: Driver, vanilla: Any) -> None:
    prompt = random_ids(64, 1)
    first = driver.ask("a", prompt, session="s")
    again = driver.ask("b", prompt, session="s")
    assert again.token_ids == first.token_ids
    assert again.report is not None
    assert again.report.hbm_tokens == 63
    assert again.report.miss_reasons == {"last_token": 1}
    assert_greedy(vanilla, again)


# --- too little room --------------------------------------------------------------------------------------------------


def test_preempted_and_evicted_texts_are_right(path: Path, vanilla: Any) -> None:
    """Six texts of up to six pages each, twice, in nine pages."""
    driver = Driver(path, hbm_tokens=9 * 32, step_tokens=40)
    prompts = [random_ids(20 + 9 * i, i) for i in range(6)]
    first = [driver.submit(f"a{i}", p, max_tokens=100, ignore_eos=True) for i, p in enumerate(prompts)]
    driver.run()
    second = [
        driver.submit(f"b{i}", [*a.text, 5, 6], session=f"a{i}", max_tokens=20, ignore_eos=True)
        for i, a in enumerate(first)
    ]
    driver.run()
    for answer in first + second:
        assert_greedy(vanilla, answer)
    stats = driver.engine.stats()
    assert stats.preemptions > 0
    assert stats.evicted_blocks > 0
    assert stats.miss_tokens["evicted"] > 0


def test_the_longest_context_fits_alone(path: Path, vanilla: Any) -> None:
    """The text is the same whatever lies in HBM already, and whatever its first rows are copied from."""
    driver = Driver(path, hbm_tokens=5 * 32)
    assert driver.engine.model.max_context == 128
    prompt = random_ids(100, 1)
    for i, cut in enumerate((100, 100, 99, 67, 33, 3)):
        answer = driver.ask(f"r{i}", prompt[:cut] + random_ids(100 - cut, 50 + i), max_tokens=200, ignore_eos=True)
        assert len(answer.text) == 128
        assert answer.finish_reason == "length"
        assert_greedy(vanilla, answer)


class WidePages(TorchAttention):
    """Make several blocks to a page, as on a GPU, so that forks and evictions split pages."""

    page_multiple = 128


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("seed", "page"), [(0, 32), (1, 32), (2, 32), (3, 32), (4, 128), (5, 128), (6, 128)])
def test_anything_at_any_time(path: Path, vanilla: Any, monkeypatch: pytest.MonkeyPatch, seed: int, page: int) -> None:
    """Sessions that go on, fork and start again, are stopped and dropped, in an HBM that holds a few of them."""
    if page == WidePages.page_multiple:
        monkeypatch.setitem(BACKENDS, "torch_cpu", WidePages)
    rng = random.Random(seed)
    driver = Driver(
        path,
        hbm_tokens=rng.choice((7, 12, 30)) * page,
        step_tokens=rng.choice((16, 40, 0)),
        max_seqs=rng.choice((2, 5)),
        max_sessions=rng.choice((2, 50)),
        chunked_prefill=rng.random() < 0.8,
        max_context=150,
    )
    window = driver.engine.model.max_context
    answers: list[Answer] = []
    live: list[str] = []
    for number in range(40):
        known = rng.choice(answers).text if answers and rng.random() < 0.7 else random_ids(rng.randint(1, 40), seed)
        prompt = known[: rng.choice((len(known), rng.randint(1, len(known))))] + random_ids(rng.randint(1, 30), number)
        prompt = prompt[-min(len(prompt), window - 2) :]
        name = f"r{number}"
        options = {"session": f"s{rng.randint(0, 5)}", "max_tokens": rng.randint(1, 40), "ignore_eos": True}
        answers.append(driver.submit(name, prompt, **options))
        live.append(name)
        for _ in range(rng.choice((0, 1, 5, 12))):
            if driver.engine.has_work():
                driver.step()
        if live and rng.random() < 0.3:
            driver.engine.abort(live.pop(rng.randrange(len(live))))
            driver.check()
        if live and rng.random() < 0.2:
            name = live.pop(rng.randrange(len(live)))
            driver.engine.finish(name, 0, rng.randint(0, len(driver.answers[name, 0].token_ids)))
            driver.check()
    driver.run()
    for answer in answers:
        assert answer.error is None
        if answer.token_ids:
            assert_greedy(vanilla, answer)
    assert sum(len(answer.token_ids) > 0 for answer in answers) > 25
    assert driver.engine.model.page_size == page


# --- what a draw depends on -------------------------------------------------------------------------------------------


def test_the_same_seed_says_the_same_alone_and_in_a_crowd(path: Path) -> None:
    options = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.2, "presence_penalty": 0.3, "max_tokens": 40}
    prompt = random_ids(40, 1)
    alone = Driver(path).ask("a", prompt, seed=7, ignore_eos=True, **options)
    driver = Driver(path, step_tokens=48, hbm_tokens=10 * 32)
    for i in range(5):
        driver.submit(f"other{i}", random_ids(15 * i + 5, i), seed=i, ignore_eos=True, **options)
        driver.step()
    same = driver.submit("same", prompt, seed=7, ignore_eos=True, **options)
    sequence = driver.choices["same/0"].sequence
    driver.run()
    assert sequence.preemptions > 0
    assert same.token_ids == alone.token_ids
    again = driver.ask("again", prompt, session="same", seed=7, ignore_eos=True, **options)
    assert again.cached > 0
    assert again.token_ids == alone.token_ids
    assert driver.ask("other", prompt, seed=8, ignore_eos=True, **options).token_ids != alone.token_ids


def test_choices_differ_and_are_each_reproducible(driver: Driver, vanilla: Any) -> None:
    prompt = random_ids(40, 1)
    options = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 12, "seed": 5}
    driver.submit("a", prompt, choices=3, **options)
    driver.run()
    driver.submit("b", prompt, choices=3, **options)
    driver.run()
    texts = [driver.answers["a", i].token_ids for i in range(3)]
    assert len({tuple(text) for text in texts}) == 3
    assert [driver.answers["b", i].token_ids for i in range(3)] == texts
    driver.submit("c", prompt, choices=3)
    driver.run()
    for i in range(3):
        assert_greedy(vanilla, driver.answers["c", i])


def test_choices_compute_their_prompt_once(driver: Driver) -> None:
    driver.submit("a", random_ids(100, 1), choices=4, temperature=1.0)
    driver.run()
    computed = [driver.answers["a", i].report.computed_tokens for i in range(4)]  # type: ignore[union-attr]
    assert sorted(computed) == [4, 4, 4, 100]  # three blocks are shared, the open one is not


def test_logprobs_are_the_models_own(driver: Driver, vanilla: Any) -> None:
    """They are of the distribution before penalties, bias and temperature."""
    answer = driver.ask(
        "a", random_ids(33, 1), logprobs=5, temperature=0.7, logit_bias={9: 5.0}, presence_penalty=0.5, ignore_eos=True
    )
    want = vanilla_logits(vanilla, answer.text[:-1])[32:].log_softmax(-1)
    assert len(answer.logprobs) == len(answer.token_ids) == 16
    for row, token, said in zip(want, answer.token_ids, answer.logprobs, strict=True):
        assert said.logprob == pytest.approx(row[token].item(), abs=1e-4)
        best = row.topk(5)
        assert [token for token, _ in said.top] == best.indices.tolist()
        assert [value for _, value in said.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_no_logprobs_unless_asked_for(driver: Driver) -> None:
    assert driver.ask("a", random_ids(9, 1)).logprobs == []
    assert [said.top for said in driver.ask("b", random_ids(9, 1), logprobs=0).logprobs] == [[]] * 16


# --- failures ---------------------------------------------------------------------------------------------------------


class Fault:
    """A forward hook that spoils what a module computed at one of its calls, which then fails."""

    def __init__(self, module: Any, *, fail_at: int) -> None:
        self._calls, self._fail_at = 0, fail_at
        self._handle = module.register_forward_hook(self)

    def __call__(self, module: Any, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        self._calls += 1
        if self._calls == self._fail_at:
            out.fill_(float("nan"))
            raise RuntimeError("injected")

    def remove(self) -> None:
        self._handle.remove()


@pytest.mark.parametrize("fail_at", [1, 2, 4, 6])
def test_a_step_that_fails(path: Path, vanilla: Any, fail_at: int) -> None:
    """Half of its KV is written, spoilt. All that ran or waited gets an error, the engine goes on, and nothing of that
    step is ever reused."""
    driver = Driver(path, step_tokens=40, max_seqs=3)
    before = driver.ask("before", random_ids(45, 9), session="s", max_tokens=10, ignore_eos=True)
    fault = Fault(driver.model.model.layers[2], fail_at=fail_at)
    prompts = [before.text + random_ids(30, 1), random_ids(60, 2), before.text[:40] + random_ids(9, 3), [5, 6, 7]]
    for i, prompt in enumerate(prompts):
        driver.submit(f"a{i}", prompt, session="s" if i == 0 else str(i), ignore_eos=True)
    for _ in range(fail_at - 1):
        driver.step()
    driver.step_and_fail()
    for i in range(4):
        answer = driver.answers[f"a{i}", 0]
        assert (answer.finish_reason, answer.error_code) == ("error", "internal_error")
    assert not driver.engine.has_work()
    assert driver.engine.stats().leases == 0
    fault.remove()
    for i, prompt in enumerate(prompts):
        driver.submit(f"b{i}", prompt, session="s" if i == 0 else str(i), ignore_eos=True)
    driver.run()
    for i in range(4):
        assert_greedy(vanilla, driver.answers[f"b{i}", 0])


# --- what it says of itself -------------------------------------------------------------------------------------------


def test_reports_and_timings_come_when_they_are_due(driver: Driver) -> None:
    answer = driver.submit("a", random_ids(9, 1), max_tokens=4, ignore_eos=True)
    outputs = [driver.step() for _ in range(4)]
    assert [output.report is not None for [output] in outputs] == [True, False, False, False]
    assert [timings is not None for timings in answer.timings] == [True, False, False, True]
    last = answer.timings[-1]
    assert last is not None
    assert last.queue_ms == 1000.0  # arrived at 0, scheduled at 1
    assert last.load_ms == 0
    assert last.prefill_ms > 0
    # Four steps at seconds 1 to 4, each token stamped when its step ended.
    assert last.decode_ms == pytest.approx(3000, abs=500)


def test_totals_add_up(driver: Driver) -> None:
    history: list[int] = []
    for turn in range(3):
        history = driver.ask(f"r{turn}", history + random_ids(20, turn), session="s", ignore_eos=True).text
    stats = driver.engine.stats()
    reports = [answer.report for answer in driver.answers.values() if answer.report]
    assert stats.prompt_tokens == {
        "hbm": sum(r.hbm_tokens for r in reports),
        "dram": 0,
        "disk": 0,
        "redis": 0,
        "computed": sum(r.computed_tokens for r in reports),
    }
    assert sum(stats.prompt_tokens.values()) == sum(len(answer.prompt) for answer in driver.answers.values())
    assert sum(stats.miss_tokens.values()) == stats.prompt_tokens["computed"]
    assert stats.generated_tokens == 48
    assert stats.steps == 48
    assert stats.step_seconds > 0
    assert (stats.sessions, stats.running, stats.waiting, stats.aborted) == (1, 0, 0, 0)


def test_sessions_are_forgotten_after_their_time(path: Path) -> None:
    driver = Driver(path, ttl_s=5.0)
    driver.ask("a", random_ids(50, 1), session="s")
    assert driver.engine.stats().sessions == 1
    driver.engine.idle(now=float("inf"))
    driver.check()
    assert driver.engine.stats().sessions == 0


def test_errors_of_cuda_are_fatal_and_too_little_memory_is_not(path: Path) -> None:
    engine = Driver(path).engine
    wrapped = RuntimeError("a thread failed")
    wrapped.__cause__ = torch.AcceleratorError("illegal memory access")
    assert engine.is_fatal(torch.AcceleratorError("illegal memory access"))
    assert engine.is_fatal(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    assert engine.is_fatal(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"))
    assert engine.is_fatal(wrapped)
    assert not engine.is_fatal(torch.OutOfMemoryError("2 GiB"))
