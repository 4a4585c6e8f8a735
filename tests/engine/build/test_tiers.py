"""Tests that texts depend neither on the tier from which a conversation's KV returns nor on failures on the way."""

import math
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.storage.errors import BlockMissing
from reprise.cache.storage.extent_reader import ExtentReader
from reprise.kernels import checksums
from reprise.kernels.attention import BACKENDS
from reprise.kernels.attention.torch_cpu import TorchAttention
from tests.engine.driver import Answer, Driver
from tests.engine.models import family_model, random_ids
from tests.example_counts import examples

SLOT = 32 * 4 * 2 * (16 + 16) * 4  # bytes of a block of the tiny model: layers, heads, K and V, fp32
WINDOW = 256


def tiered(path: Path, **changes: Any) -> Driver:
    """HBM for one context of the window, and tiers below it that are always worth a load."""
    settings = {"cache_mode": "attentionstore", "hbm_tokens": WINDOW + 32, "max_context": WINDOW, **changes}
    driver = Driver(path, **settings)
    assert driver.engine.model.max_context == WINDOW
    driver.cache.rates.load_s = lambda direction, num_bytes: 0.0  # type: ignore[method-assign]
    driver.cache._loads._worth_waiting_s = lambda load: math.inf  # type: ignore[method-assign]
    driver.cache._loads.is_fetch_late = lambda context: False  # type: ignore[method-assign]  # a step is a second here
    return driver


def reference(path: Path, **changes: Any) -> Driver:
    return Driver(path, cache_mode="recompute", hbm_tokens=WINDOW + 32, max_context=WINDOW, **changes)


def turn(number: int, conversation: int) -> list[int]:
    return random_ids(random.Random(f"{number} {conversation}").randrange(10, 45), 100 * number + conversation)


def converse(
    driver: Driver, *, conversations: int = 4, turns: int = 4, at_once: bool = False, first: int = 0, **histories: Any
) -> tuple[list[list[int]], Counter[str]]:
    """Conversations turn by turn. Returns their texts, and where their history came from."""
    texts: list[list[int]] = histories.get("texts") or [random_ids(40, 0) for _ in range(conversations)]
    tiers: Counter[str] = Counter()
    for number in range(first, first + turns):
        answers: list[Answer] = []
        for conversation, text in enumerate(texts):
            prompt = text + turn(number, conversation)
            send = driver.submit if at_once else driver.ask
            answers.append(
                send(f"{number}/{conversation}", prompt, session=f"s{conversation}", max_tokens=9, ignore_eos=True)
            )
        driver.run()
        for answer in answers:
            assert answer.error is None, answer.error
            assert answer.report is not None
            assert sum(answer.report.miss_reasons.values()) == answer.report.computed_tokens
            tiers.update(answer.report.by_source())
            tiers.update(answer.report.miss_reasons)
        texts = [answer.text for answer in answers]
    return texts, tiers


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    return converse(reference(path))[0]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"dram_bytes": 100 * SLOT}, "dram"),
        ({"dram_bytes": 6 * SLOT, "staging_bytes": 6 * SLOT, "cache_policy": "lookahead"}, "dram"),
        ({"dram_bytes": 100 * SLOT, "read_buffer_layers": 0}, "dram"),
        ({"dram_bytes": 100 * SLOT, "sync_save": True, "cache_policy": "lookahead"}, "dram"),
        ({"dram_bytes": 0, "disk_bytes": 1 << 28}, "disk"),
        ({"dram_bytes": 0, "disk_bytes": 1 << 28, "staging_bytes": 3 * SLOT}, "disk"),
        ({"dram_bytes": 4 * SLOT, "disk_bytes": 1 << 28, "read_buffer_layers": 1}, "disk"),
        ({"dram_bytes": 9 * SLOT, "disk_bytes": 1 << 28, "cache_policy": "lookahead"}, "disk"),
        ({"dram_bytes": 4 * SLOT, "disk_bytes": 30 * SLOT, "cache_policy": "fifo"}, "disk"),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_a_history_from_below_is_the_history(
    path: Path, tmp_path: Path, expected: list[list[int]], settings: dict[str, Any], found: str, at_once: bool
) -> None:
    driver = tiered(path, **settings, disk_dir=str(tmp_path))
    texts, tiers = converse(driver, at_once=at_once)
    assert texts == expected
    assert tiers[found] > 0
    stats = driver.engine.stats()
    assert not stats.load_failures
    assert (stats.leases, stats.in_flight) == (0, 0)
    assert not driver.engine.is_moving()
    driver.close()


@pytest.mark.parametrize("dram_bytes", [0, 100 * SLOT])
def test_no_turn_waits_until_checksums_are_compiled(path: Path, dram_bytes: int) -> None:
    checksums._compiled.cache_clear()
    tiered(path, dram_bytes=dram_bytes)
    assert checksums._compiled.cache_info().currsize == (1 if dram_bytes else 0)


def test_with_room_for_all_nothing_is_computed_twice(path: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    driver = tiered(path, dram_bytes=0, disk_bytes=1 << 28, disk_dir=str(tmp_path))
    texts, tiers = converse(driver)
    assert texts == expected
    assert set(+tiers) <= {"hbm", "dram", "disk", "computed", "new", "last_token"}
    driver.close()


def test_a_turn_leaves_one_extent(path: Path, tmp_path: Path) -> None:
    """Its open block is saved last, and is not written by itself."""
    driver = tiered(path, dram_bytes=100 * SLOT, disk_bytes=1 << 28, disk_dir=str(tmp_path))
    for turns in range(1, 4):
        driver.ask(f"{turns}", random_ids(40, turns), session=f"s{turns}", max_tokens=9, ignore_eos=True)
        driver.run()
        assert len(extent_files(driver)) == turns
    driver.close()


def test_eight_conversations_at_once_that_displace_each_other(path: Path, tmp_path: Path) -> None:
    expected = converse(reference(path), conversations=8, turns=3, at_once=True)[0]
    driver = tiered(path, dram_bytes=5 * SLOT, disk_bytes=1 << 28, disk_dir=str(tmp_path))
    texts, tiers = converse(driver, conversations=8, turns=3, at_once=True)
    assert texts == expected
    assert tiers["disk"] + tiers["dram"] > 8 * 40
    driver.close()


def test_larger_pages(path: Path, tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    class WidePages(TorchAttention):
        page_multiple = 64

    monkeypatch.setitem(BACKENDS, "torch_cpu", WidePages)
    driver = tiered(path, dram_bytes=4 * SLOT, disk_bytes=1 << 28, disk_dir=str(tmp_path), hbm_tokens=WINDOW + 128)
    assert driver.cache.page_size == 64
    texts, tiers = converse(driver, at_once=True)
    assert texts == expected
    assert tiers["disk"] > 0
    driver.close()


# --- branches and parts -----------------------------------------------------------------------------------------------


def test_branches_of_a_conversation(path: Path, tmp_path: Path) -> None:
    """Regenerated, edited and gone on with, each with everything else displaced in between."""
    ours = tiered(path, dram_bytes=4 * SLOT, disk_bytes=1 << 28, disk_dir=str(tmp_path))
    theirs = reference(path)
    base = random_ids(110, 1)
    said: dict[str, list[list[int]]] = {"ours": [], "theirs": []}
    for name, driver in (("ours", ours), ("theirs", theirs)):
        first = driver.ask("a", base, session="s", max_tokens=20, ignore_eos=True)
        prompts = [base, [*first.text, 5], base[:70] + [7] * 20, [*first.text[:-3], 9, 9], base, first.text]
        for number, prompt in enumerate(prompts):
            driver.ask(f"other{number}", random_ids(200, 50 + number), session=f"o{number}", max_tokens=2)
            answer = driver.ask(f"b{number}", prompt, session="s", max_tokens=12, ignore_eos=True)
            said[name].append(answer.token_ids)
            if name == "ours" and number != 2:
                assert answer.cached >= 96
    assert said["ours"] == said["theirs"]
    ours.close()


def test_half_in_hbm_and_half_on_disk(path: Path, tmp_path: Path) -> None:
    driver = tiered(path, dram_bytes=0, disk_bytes=1 << 28, disk_dir=str(tmp_path), hbm_tokens=1024)
    prompt = random_ids(150, 1)
    first = driver.ask("a", prompt, session="s", ignore_eos=True)
    chain = driver.cache.sessions.contexts["t", "", "s"].keys
    for key in chain[2:]:
        driver.cache.tiers.hbm.evict(key)
    again = driver.ask("b", [*first.text, 7, 8], session="s", ignore_eos=True)
    assert again.report is not None
    # 165 rows were computed: five blocks, of which three left HBM, and an open one of 5, which did not.
    assert (again.report.hbm_tokens, again.report.disk_tokens, again.report.computed_tokens) == (69, 96, 3)
    plain = reference(path)
    assert plain.ask("b", again.prompt, ignore_eos=True).token_ids == again.token_ids
    driver.close()


# --- the end of the process -------------------------------------------------------------------------------------------


def spoil_nothing(directory: Path) -> None:
    pass


def lose_the_index(directory: Path) -> None:
    gone = [file for file in directory.rglob("*") if ".sqlite" in file.name or ".db" in file.name]
    assert gone
    for file in gone:
        file.unlink()


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("spoil", [spoil_nothing, lose_the_index])
def test_conversations_survive_their_process(path: Path, tmp_path: Path, killed: bool, spoil: Any) -> None:
    plain = reference(path)
    expected, _ = converse(plain, turns=2)
    settings = {"dram_bytes": 20 * SLOT, "disk_bytes": 1 << 28}
    driver = tiered(path, **settings, disk_dir=str(tmp_path / "one"))
    texts, _ = converse(driver, turns=2)
    assert texts == expected
    if killed:
        shutil.copytree(tmp_path / "one", tmp_path / "two")
    driver.close()
    if not killed:
        shutil.move(tmp_path / "one", tmp_path / "two")
    spoil(tmp_path / "two")
    driver = tiered(path, **settings, disk_dir=str(tmp_path / "two"))
    assert driver.engine.stats().sessions == 4
    again, tiers = converse(driver, turns=1, first=2, texts=texts)
    assert again == converse(plain, turns=1, first=2, texts=texts)[0]
    assert tiers["disk"] + tiers["dram"] + tiers["hbm"] == sum(len(text) - 1 for text in texts), (
        "all but each last sampled token"
    )
    driver.close()


# --- what goes wrong --------------------------------------------------------------------------------------------------


def flip_dram(driver: Driver) -> None:
    slab = driver.engine._transfer._slab
    for row in driver.cache.tiers.table:
        if "dram" in row.copies:
            slab.k(2)[row.copies.get("dram"), 0, 0, 0] += 1.0


def extent_files(driver: Driver) -> list[Path]:
    directory = Path(driver.engine._transfer._disk._directory)  # type: ignore[union-attr]
    files = [file for file in directory.rglob("*") if file.is_file() and file.stat().st_size > 8192]
    return [file for file in files if "sqlite" not in file.name and ".db" not in file.name]


def cut_extents(driver: Driver) -> None:
    for file in extent_files(driver):
        with open(file, "r+b") as handle:
            handle.truncate(file.stat().st_size // 2)


def delete_extents(driver: Driver) -> None:
    for file in extent_files(driver):
        file.unlink()


def flip_extents(driver: Driver) -> None:
    for file in extent_files(driver):
        data = bytearray(file.read_bytes())
        data[-5000] ^= 255
        data[len(data) // 2] ^= 255
        file.write_bytes(data)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("spoil", "settings"),
    [
        (flip_dram, {"dram_bytes": 100 * SLOT}),
        (cut_extents, {"disk_bytes": 1 << 28}),
        (delete_extents, {"disk_bytes": 1 << 28}),
        (flip_extents, {"disk_bytes": 1 << 28}),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_what_cannot_be_believed_is_computed_again(
    path: Path, tmp_path: Path, expected: list[list[int]], spoil: Any, settings: dict[str, Any], at_once: bool
) -> None:
    driver = tiered(path, **settings, disk_dir=str(tmp_path))
    texts: list[list[int]] = [random_ids(40, 0) for _ in range(4)]
    reasons: Counter[str] = Counter()
    for number in range(4):
        texts, tiers = converse(driver, turns=1, first=number, texts=texts, at_once=at_once)
        reasons.update(tiers)
        spoil(driver)
    assert texts == expected
    assert sum(driver.engine.stats().load_failures.values()) > 0
    assert reasons["load_failed"] > 0
    driver.close()


def test_a_disk_that_does_not_answer_in_the_middle_of_a_step(
    path: Path, tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tiered(path, disk_bytes=1 << 28, disk_dir=str(tmp_path))
    land = ExtentReader.land
    calls = Counter[str]()

    def hanging(self: Any, layer: int, wanted: Any, outs: Any, landed: Any) -> int:
        calls["all"] += 1
        if layer <= 2 < layer + len(outs) and calls["all"] % 2:
            if layer < 2:
                land(self, layer, wanted, outs[: 2 - layer], landed)
            raise BlockMissing("the disk does not answer", reason="deadline")
        return land(self, layer, wanted, outs, landed)

    monkeypatch.setattr(ExtentReader, "land", hanging)
    texts, tiers = converse(driver, at_once=True)
    assert texts == expected
    assert driver.engine.stats().load_failures["deadline"] > 0
    assert tiers["load_failed"] > 0
    assert tiers["disk"] > 0
    driver.close()


def test_a_client_that_leaves_while_its_history_is_loaded(path: Path, tmp_path: Path) -> None:
    driver = tiered(path, dram_bytes=100 * SLOT, read_buffer_layers=0, disk_dir=str(tmp_path))
    texts, _ = converse(driver, turns=2)
    for number, text in enumerate(texts):
        driver.submit(f"gone{number}", text + [7] * 20, session=f"s{number}", ignore_eos=True)
        if number % 2:
            driver.step()
        driver.engine.abort(f"gone{number}")
        driver.answers.pop((f"gone{number}", 0))
    driver.run()
    again, _ = converse(driver, turns=2, first=2, texts=texts)
    plain = reference(path)
    assert again == converse(plain, turns=2, first=2, texts=texts)[0]
    driver.close()


# --- contexts that outgrow the window ---------------------------------------------------------------------------------

SYSTEM = 40


def outgrow(driver: Driver, *, turns: int, conversations: int = 2, new: int = 12, client: bool = True) -> Any:
    """Conversations with a system prompt that go on past the window, sent in full every time."""
    texts = [random_ids(SYSTEM, 7) for _ in range(conversations)]
    starts: list[list[int]] = [[0] for _ in range(conversations)]
    said, dropped = [], [0] * conversations
    for number in range(turns):
        for conversation in range(conversations):
            starts[conversation].append(len(texts[conversation]))
            prompt = texts[conversation] + turn(number, conversation)
            answer = driver.ask(
                f"{number}/{conversation}",
                prompt,
                session=f"s{conversation}",
                max_tokens=new,
                ignore_eos=True,
                truncation="auto",
                keep_first_tokens=SYSTEM,
                message_starts=tuple(starts[conversation]),
            )
            assert answer.error is None, answer.error
            assert len(answer.token_ids) == new
            assert answer.report is not None
            assert new > WINDOW or answer.report.prompt_tokens + answer.report.truncated_tokens == len(prompt)
            assert answer.report.prompt_tokens < WINDOW
            assert answer.report.truncated_tokens >= dropped[conversation]
            dropped[conversation] = answer.report.truncated_tokens
            said.append(answer.token_ids)
            starts[conversation].append(len(prompt))
            texts[conversation] = answer.text
    assert min(dropped) > 0
    return said, driver.engine.stats()


def test_cut_contexts_from_tiers_are_those_from_hbm(path: Path, tmp_path: Path) -> None:
    everything = tiered(path, cache_mode="prefix", hbm_tokens=1 << 14)
    turns = examples(30)
    expected, _ = outgrow(everything, turns=turns)
    driver = tiered(
        path, dram_bytes=4 * SLOT, disk_bytes=1 << 28, disk_dir=str(tmp_path), cache_policy="lookahead",
    )  # fmt: skip
    said, stats = outgrow(driver, turns=turns)
    assert said == expected
    assert stats.prompt_tokens["disk"] > 0
    assert stats.truncated_tokens > 0
    assert "lineage_reset" not in stats.miss_tokens
    assert stats.prompt_tokens["computed"] < turns * 2 * 80, "a turn costs what is new"
    driver.close()


@pytest.mark.long
def test_an_answer_longer_than_the_window(path: Path, tmp_path: Path) -> None:
    everything = tiered(path, cache_mode="prefix", hbm_tokens=1 << 14)
    expected, _ = outgrow(everything, turns=2, conversations=2, new=280)
    driver = tiered(path, dram_bytes=4 * SLOT, disk_bytes=1 << 28, disk_dir=str(tmp_path))
    said, _ = outgrow(driver, turns=2, conversations=2, new=280)
    assert said == expected
    driver.close()


def test_cut_contexts_survive_a_restart(path: Path, tmp_path: Path) -> None:
    settings = {"dram_bytes": 0, "disk_bytes": 1 << 28, "disk_dir": str(tmp_path)}
    prompt = random_ids(SYSTEM, 7) + random_ids(300, 8)
    options = {"session": "s", "ignore_eos": True, "truncation": "auto", "keep_first_tokens": SYSTEM}
    everything = tiered(path, cache_mode="prefix", hbm_tokens=1 << 14)
    driver = tiered(path, **settings)
    for each in (everything, driver):
        first = each.ask("a", prompt, message_starts=(0, 40, 200), **options)
    driver.close()
    driver = tiered(path, **settings)
    second = [each.ask("b", first.text + [7] * 9, message_starts=(0, 40, 200, 340), **options)
              for each in (everything, driver)]  # fmt: skip
    assert second[0].token_ids == second[1].token_ids
    assert second[0].report is not None
    assert second[1].report is not None
    assert second[0].report.truncated_tokens == second[1].report.truncated_tokens > 0
    assert second[1].cached == second[0].cached
    driver.close()


def test_a_client_that_edits_what_was_dropped_begins_anew(path: Path, tmp_path: Path) -> None:
    driver = tiered(path, dram_bytes=100 * SLOT)
    prompt = random_ids(300, 8)
    options = {"session": "s", "ignore_eos": True, "truncation": "auto"}
    first = driver.ask("a", prompt, message_starts=(0, 250), **options)
    edited = [*first.text[:20], 5, *first.text[21:], 7, 7]
    second = driver.ask("b", edited, message_starts=(0, 250, 316), **options)
    fresh = tiered(path, dram_bytes=100 * SLOT).ask("b", edited, message_starts=(0, 250, 316), **options)
    assert second.token_ids == fresh.token_ids
    assert second.error is None


def grow_old(
    driver: Driver, turns: int, before: Callable[[int], object] = lambda number: None
) -> list[tuple[int, int, dict[str, int]]]:
    """Return for each turn of a conversation that outgrows the window the tokens that are cut, the history, and why the
    rest was computed. before: called with the number of every turn in front of it."""
    told, text, starts = [], random_ids(20, 1), [0]
    for number in range(turns):
        before(number)
        starts.append(len(text))
        answer = driver.ask(
            str(number), text + random_ids(30, 50 + number), session="s", max_tokens=12, ignore_eos=True,
            truncation="auto", keep_first_tokens=20, message_starts=tuple(starts),
        )  # fmt: skip
        starts.append(len(answer.prompt))
        text = answer.text
        assert answer.report is not None
        told.append((answer.report.truncated_tokens, answer.report.history_tokens, answer.report.miss_reasons))
    return told


def test_what_a_cut_left_is_history_whatever_became_of_it(path: Path) -> None:
    everything = grow_old(tiered(path, dram_bytes=100 * SLOT), 12)
    assert [dropped for dropped, _, _ in everything[4::3]] == [0, 128, 256]
    assert all(reasons == {"new": 31} for _, _, reasons in everything[1:]), "31: with the last token of the answer"

    recomputed = grow_old(tiered(path, cache_mode="recompute"), 12)
    assert [turn[:2] for turn in recomputed] == [turn[:2] for turn in everything]
    assert all(reasons == {"disabled": known, "new": 31} for _, known, reasons in recomputed[1:])

    small = tiered(path, cache_mode="prefix")

    def displace(number: int) -> None:
        for other in range(3 if number == 6 else 0):
            small.ask(f"other {other}", random_ids(250, 900 + other), max_tokens=2, ignore_eos=True)

    forgotten = grow_old(small, 12, displace)
    assert [turn[:2] for turn in forgotten] == [turn[:2] for turn in everything]
    assert [reasons for _, _, reasons in forgotten[5:8]] == [
        {"new": 31},
        {"lineage_reset": 143, "new": 31},
        {"new": 31},
    ]

    moved = grow_old(tiered(path, dram_bytes=100 * SLOT, truncation_mode="recompute"), 12)
    assert [turn[:2] for turn in moved] == [turn[:2] for turn in everything]
    cut = [5, 8, 11]
    assert all(reasons == {"truncated": moved[turn][1] - 32, "new": 31} for turn in cut for reasons in [moved[turn][2]])
    assert all(moved[turn][2] == {"new": 31} for turn in range(1, 12) if turn not in cut)


def test_a_cut_conversation_keeps_the_names_of_all_its_blocks(path: Path) -> None:
    driver = tiered(path, dram_bytes=100 * SLOT)
    grow_old(driver, 12)
    ((_, session),) = driver.cache.sessions.contexts.items()
    conversation = driver.answers["11", 0].text[:-1]
    assert session.truncated_tokens == 384
    assert session.conversation_keys == session.lineage.domain.chain(conversation)


@pytest.mark.parametrize(("turn", "expired"), [(4, 160), (5, 96), (6, 128)])
def test_what_had_expired_is_known_in_front_of_a_cut_at_one_and_behind(path: Path, turn: int, expired: int) -> None:
    driver = tiered(path, dram_bytes=100 * SLOT)
    _, _, reasons = grow_old(driver, turn + 1, lambda number: number == turn and driver.cache.sessions.sweep(1e9))[-1]
    kept = grow_old(tiered(path, dram_bytes=100 * SLOT), turn + 1)[-1][1]
    assert kept - expired in range(BLOCK_TOKENS)  # whole blocks are known
    assert reasons["expired"] == expired
    assert set(reasons) == {"expired", "new"}


def test_an_edit_behind_a_cut_and_in_front_of_it(path: Path) -> None:
    driver = tiered(path, cache_mode="recompute")
    options = {"session": "s", "ignore_eos": True, "truncation": "auto"}
    first = driver.ask("a", random_ids(300, 8), message_starts=(0, 250), **options)
    edited = [*first.text[:-3], first.text[-3] ^ 1, *first.text[-2:], 7, 7]
    second = driver.ask("b", edited, message_starts=(0, 250, 316), **options)
    assert first.report is not None
    assert second.report is not None
    assert second.report.truncated_tokens == first.report.truncated_tokens > 0
    assert second.report.miss_reasons == {"disabled": 185, "diverged": 2, "new": 3}
    driver = tiered(path, dram_bytes=100 * SLOT)
    first = driver.ask("a", random_ids(300, 8), message_starts=(0, 250), **options)
    again = driver.ask("b", first.prompt, message_starts=(0, 250), **options)
    assert again.report is not None
    assert again.report.miss_reasons == {"last_token": 1}
    assert first.report is not None
    edited = [first.text[0] ^ 1, *first.text[1:], 7, 7]
    second = driver.ask("c", edited, message_starts=(0, 250, 316), **options)
    assert second.report is not None
    assert second.report.miss_reasons == {"new": 3}, "what is left was never computed behind what is edited"


def test_truncation_can_be_refused(path: Path) -> None:
    driver = tiered(path, dram_bytes=100 * SLOT)
    answer = driver.ask("a", random_ids(300, 8), truncation="disabled")
    assert answer.error_code == "context_length_exceeded"
    answer = driver.ask("b", random_ids(300, 8), truncation="auto", keep_first_tokens=280)
    assert answer.error_code == "context_length_exceeded", "what has to stay is longer than the window"


def test_a_model_whose_keys_carry_their_position_computes_what_was_kept_again(tmp_path: Path) -> None:
    family_model("gpt2", n_positions=WINDOW).save_pretrained(tmp_path / "gpt2")
    driver = tiered(tmp_path / "gpt2", dram_bytes=1 << 24)
    plain = reference(tmp_path / "gpt2")
    options = {"session": "s", "ignore_eos": True, "truncation": "auto"}
    first = driver.ask("a", random_ids(200, 8), message_starts=(0, 100), **options)
    second = driver.ask("b", first.text + random_ids(60, 9), message_starts=(0, 100, len(first.text)), **options)
    assert second.report is not None
    assert second.report.truncated_tokens > 0
    kept = second.prompt[second.report.truncated_tokens :]
    assert plain.ask("c", kept, ignore_eos=True).token_ids == second.token_ids
    third = driver.ask(
        "d", second.text + [7] * 8, message_starts=(0, 100, len(first.text), len(second.text)), **options
    )
    assert third.cached > 0
