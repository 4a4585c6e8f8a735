"""Tests every type that is served on a tiny random model in fp32, from the files to the text: what is reused, from
wherever, changes nothing that transformers would say, and is as much as it has to be."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.truncate import apply_cuts
from reprise.engine.drafts import drafter
from reprise.engine.model.known_types import KNOWN_TYPES
from reprise.engine.model.pages import spoil
from reprise.kernels.cpu.available import decode_kernels, expert_kernels
from tests.engine.drafted_cases import all_of_them
from tests.engine.driver import Answer, Driver
from tests.engine.model_zoo import tiny_config
from tests.engine.ready_models import forget
from tests.engine.saved_models import SavedModel, save_model
from tests.engine.test_unreadable_extents import file_of, flip, with_disk
from tests.engine.wrappers import IMAGE_ID

ALWAYS = ("llama", "gpt_oss", "qwen3_moe", "gemma3", "mistral3", "deepseek_v3", "gemma4", "qwen3_vl")
SERVED = sorted(name for name, known in KNOWN_TYPES.items() if known.is_served)
WINDOW = 256  # tokens, as the engines of `with_disk` have it
TURNS = ((70, 9), (11, 23), (40, 5), (5, 12))  # tokens of a question and of its answer


def marks_of(model_type: str) -> list[pytest.MarkDecorator]:
    return [] if model_type in ALWAYS else [pytest.mark.long]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=marks_of(name)) for name in SERVED])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SavedModel]:
    path = tmp_path_factory.mktemp("zoo") / request.param
    yield save_model(request.param, path)
    forget(path)


def words(count: int, seed: int) -> list[int]:
    """Token ids, none of which stands for an image."""
    rng = random.Random(seed)
    return [rng.randrange(3, IMAGE_ID) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A model in bf16, with an engine that reuses nothing."""

    path: Path
    driver: Driver

    def check(self, answer: Answer) -> None:
        """Assert that an answer is greedy text. KV that was reused may have been rounded otherwise, so tokens whose
        logprobs differ by less than 0.05 are a tie: bf16 rounds logits of 8 to that. Measured here: no tie at all."""
        assert answer.error is None, answer.error
        number = len(self.driver.answers)
        read = self.driver.ask(f"{number}", answer.text, max_tokens=1, prompt_logprobs=1)
        said = (read.prompt_logprobs or [])[len(answer.prompt) - 1 :]
        assert len(said) == len(answer.token_ids) > 0
        assert max(token.top[0][1] - token.logprob for token in said) < 0.05


def make(saved: SavedModel | Recomputed, tmp_path: Path, **changes: object) -> Driver:
    """An engine with all tiers, which waits for whatever it can load."""
    driver = with_disk(saved.path, tmp_path, **{"dram_bytes": 1 << 26, **changes})
    driver.cache.rates.compute_s = lambda tokens: 1.0 * tokens  # type: ignore[method-assign]
    return driver


def ask(
    driver: Driver, saved: SavedModel | Recomputed, name: str, prompt: list[int], tokens: int, session: str = "s"
) -> Answer:
    """Ask, and compare the answer with transformers' own."""
    answer = driver.ask(name, prompt, session=session, max_tokens=tokens, ignore_eos=True)
    saved.check(answer)
    return answer


def cached(answer: Answer) -> tuple[int, int, int]:
    """Tokens from HBM, DRAM and disk."""
    assert answer.report is not None
    return answer.report.hbm_tokens, answer.report.dram_tokens, answer.report.disk_tokens


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def forget_dram(driver: Driver) -> None:
    for row in driver.cache.tiers.table:
        if "dram" in row.copies:
            driver.cache.tiers.dram.rows.drop(row)


def conversation(driver: Driver, saved: SavedModel | Recomputed) -> list[Answer]:
    """Four turns: the second finds its history in HBM, the third in DRAM, the fourth on disk."""
    answers: list[Answer] = []
    history: list[int] = []
    for turn, (question, tokens) in enumerate(TURNS):
        if turn >= 2:
            driver.forget_hbm()
        if turn == 3:
            forget_dram(driver)
        answers.append(ask(driver, saved, f"turn {turn}", history + words(question, turn), tokens))
        if turn:
            assert cached(answers[-1])[turn - 1] == len(history) - 1, "all but the last token of the last answer"
        history = answers[-1].text
    return answers


def conversation_and_restart(saved: SavedModel | Recomputed, tmp_path: Path, **changes: object) -> None:
    """Four turns; then a new engine on the same disk gets the last turn again, a fork and two other sessions."""
    driver = make(saved, tmp_path, **changes)
    answers = conversation(driver, saved)
    driver.close()

    driver = make(saved, tmp_path, **changes)
    again = ask(driver, saved, "again", answers[3].prompt, 12)
    assert again.token_ids == answers[3].token_ids
    assert cached(again)[2] >= whole_blocks(len(again.prompt) - 1)
    fork = ask(driver, saved, "fork", answers[2].prompt + words(9, 70), 6)
    assert fork.cached >= whole_blocks(len(answers[2].prompt))
    other = ask(driver, saved, "other", answers[3].text[:130] + words(30, 71), 6, session="other")
    assert other.cached >= whole_blocks(130)
    other = ask(driver, saved, "short", answers[3].text[:40] + words(3, 72), 6, session="third")
    assert other.cached >= whole_blocks(40)
    driver.close()


def test_history_is_reused_from_every_tier_after_a_restart_and_by_forks(saved: SavedModel, tmp_path: Path) -> None:
    conversation_and_restart(saved, tmp_path)


@pytest.mark.skipif(decode_kernels() is None or expert_kernels() is None, reason="no numba or no AVX-512 here")
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_history_of_packed_experts_is_reused(model_type: str, tmp_path: Path) -> None:
    path = save_model(model_type, tmp_path / "model").path
    packed = {"dtype": "bfloat16", "model_weights": "q8"}
    recomputed = Recomputed(path, Driver(path, cache_mode="recompute", disk_dir=str(tmp_path / "plain"), **packed))
    assert any(hasattr(module, "is_transposed") for module in recomputed.driver.model.modules()), "packed experts"
    conversation_and_restart(recomputed, tmp_path / "state", **packed)


@pytest.mark.parametrize("tier", ["dram", "disk"])
def test_a_flipped_bit_is_computed_again(saved: SavedModel, tmp_path: Path, tier: str) -> None:
    driver = make(saved, tmp_path, **({"disk_bytes": 0} if tier == "dram" else {}))
    text = ask(driver, saved, "first", words(100, 80), 9).text
    session = driver.cache.sessions.contexts["t", "", "s"]
    row = driver.cache.tiers.table.get(session.keys[1])
    assert row is not None
    if tier == "disk":
        extent, _ = row.copies["disk"]
        driver.close()
        flip(file_of(tmp_path, extent), pytest.MonkeyPatch())
        driver = make(saved, tmp_path)
    else:
        driver.engine._transfer._slab.segments(2)[row.copies["dram"], 5] += 1.0
        driver.forget_hbm()
    answer = ask(driver, saved, "second", text + words(7, 81), 9)
    assert driver.engine.stats().load_failures["checksum"] == 1
    assert answer.report is not None
    assert answer.report.computed_tokens >= BLOCK_TOKENS
    driver.forget_hbm()
    again = ask(driver, saved, "third", answer.text + words(7, 82), 9)
    assert again.cached == len(answer.text) - 1
    driver.close()


def test_a_text_outgrows_the_window(saved: SavedModel, tmp_path: Path) -> None:
    """Cut and computed anew, it is transformers' own text of what is left. A text that may not be cut is refused."""
    driver = make(saved, tmp_path, truncation="auto", truncation_mode="recompute")
    text: list[int] = []
    for turn in range(4):
        prompt = text + words(60, 90 + turn)
        answer = driver.ask(f"{turn}", prompt, session="s", max_tokens=12, ignore_eos=True)
        session = driver.cache.sessions.contexts["t", "", "s"]
        saved.check(answer, apply_cuts(prompt, session.cuts))
        text = answer.text
    assert answer.report is not None
    assert answer.report.truncated_tokens > 0
    refused = driver.ask("whole", text, session="s", truncation="disabled")
    assert refused.error_code == "context_length_exceeded"
    assert str(WINDOW) in (refused.error or "")
    driver.close()


def test_what_stays_of_a_cut_text_is_reused(saved: SavedModel, tmp_path: Path) -> None:
    """Keys that can be rotated move to their new places; others are computed anew, and the text is transformers'."""
    driver = make(saved, tmp_path, truncation="auto")
    text: list[int] = []
    for turn in range(6):
        prompt = text + words(60, 90 + turn)
        answer = driver.ask(f"{turn}", prompt, session="s", max_tokens=12, ignore_eos=True)
        assert answer.error is None
        assert len(answer.token_ids) == 12
        assert answer.report is not None
        if not driver.engine.model.decouplable:
            saved.check(answer, apply_cuts(prompt, driver.cache.sessions.contexts["t", "", "s"].cuts))
        elif turn:
            assert answer.report.computed_tokens <= 61, "the question and the last token of the answer"
        text = answer.text
    assert answer.report.truncated_tokens > 0
    driver.close()


class Crowd:
    """Nine sessions of three turns that begin alike, in HBM for a third of them. Before each step every free page is
    filled with NaN. Some requests are aborted."""

    SESSIONS, TURNS = 9, 3

    def __init__(self, driver: Driver) -> None:
        self.driver, self.spoilt = driver, 0
        self.history: dict[str, int] = {}  # tokens that an earlier request has finished, by request
        self.aborted: set[str] = set()
        self._rng = random.Random(0)
        self._latest: dict[int, str] = {}
        self._turns = dict.fromkeys(range(self.SESSIONS), 0)

    @property
    def answers(self) -> dict[str, Answer]:
        return {name: answer for (name, _), answer in self.driver.answers.items()}

    def run(self) -> None:
        while any(turns < self.TURNS for turns in self._turns.values()) or self.driver.engine.has_work():
            self._submit_some()
            if self.driver.now % 12 == 6:
                self._abort_one()
            self._spoil_free_pages()
            self.driver.step()
        self.driver.run()

    def _submit_some(self) -> None:
        for number in self._rng.sample(range(self.SESSIONS), self.SESSIONS):
            last = self.answers.get(self._latest.get(number, ""))
            is_free = last is None or last.finish_reason
            if is_free and self._turns[number] < self.TURNS and self._rng.random() < 0.5:
                self._submit(number, last)

    def _submit(self, number: int, last: Answer | None) -> None:
        name = self._latest[number] = f"{number}.{self._turns[number]}"
        history = words(50, 99) if last is None else last.text
        if last is not None and last.finish_reason == "length":
            self.history[name] = len(history) - 1  # the last token of an answer is not computed
        question = words(self._rng.randint(1, 25), 100 * number + self._turns[number])
        options = {"max_tokens": self._rng.randint(8, 40), "ignore_eos": True}
        self.driver.submit(name, history + question, session=str(number), **options)
        self._turns[number] += 1

    def _spoil_free_pages(self) -> None:
        pages = self.driver.cache.tiers.pages
        free = [page for page in range(pages.num_pages) if pages.is_free(page)]
        self.spoilt += len(free)
        for layer in self.driver.compute.runner.pages:
            spoil(layer, free)

    def _abort_one(self) -> None:
        running = [name for name, answer in self.answers.items() if not answer.finish_reason]
        if running:
            name = self._rng.choice(running)
            self.driver.engine.abort(name)
            self.answers[name].finish_reason = "aborted"  # the driver fails if it still says something
            self.aborted.add(name)


def test_a_crowd_in_too_little_hbm(saved: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are tried, however little they are worth."""
    monkeypatch.setattr(drafter, "worthwhile", all_of_them)
    driver = make(saved, tmp_path, hbm_tokens=384, step_tokens=48, draft_tokens=4)
    crowd = Crowd(driver)
    crowd.run()
    stats = driver.engine.stats()
    finished = {name: answer for name, answer in crowd.answers.items() if name not in crowd.aborted}
    for name, answer in finished.items():
        saved.check(answer)
        assert answer.cached >= whole_blocks(crowd.history.get(name, 0))
    assert crowd.aborted
    assert crowd.spoilt
    assert stats.preemptions or saved.model_type not in ALWAYS  # how many there are depends on lengths of answers
    assert sum(stats.drafted_tokens.values())
    assert sum(answer.report.dram_tokens for answer in finished.values() if answer.report)
    driver.close()


def test_a_config_takes_nothing_from_those_that_were_made_before() -> None:
    tiny_config("mistral4")
    assert tiny_config("ministral3").rope_parameters.get("partial_rotary_factor") is None
