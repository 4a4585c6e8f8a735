import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from reprise.app.cli.program import cli
from reprise.loadgen.blocks import hit_tables
from reprise.loadgen.blocks.replay import BLOCK_TOKENS, SessionFinder, hit_rate
from reprise.loadgen.codec import CodedKV
from reprise.loadgen.workloads import traces
from reprise.loadgen.workloads.traces import TraceRequest

TRACES = Path(__file__).parents[4] / "shared/data/traces"


def ask(at_s, *blocks, rest=0, answer=10):
    return TraceRequest(float(at_s), len(blocks) * BLOCK_TOKENS - rest, answer, block_names=blocks)


def rate(requests, policy, blocks):
    return hit_rate(requests, policy, blocks * BLOCK_TOKENS)


# --- worked by hand ---------------------------------------------------------------------------------------------------

# Room for 3 of the blocks. Touched from the last to the first.
ROUND = [ask(0, 0, 1), ask(1, 0, 2), ask(2, 0, 1), ask(3, 0, 3), ask(4, 0, 2)]


def test_lru_by_hand():
    # 0 1 | 0 hit; 1 2 0 | 0 1 hit; 2 1 0 | 0 hit, 2 leaves: 1 3 0 | 0 hit.
    found = rate(ROUND, "lru", 3)
    assert (found.hit_blocks, found.blocks) == (5, 10)
    assert found.block_hit_rate == 0.5


def test_fifo_by_hand():
    # In the order of coming: 1 0 | 0 hit; 1 0 2 | 0 1 hit | 0 hit, 1 leaves: 0 2 3 | 0 2 hit.
    assert rate(ROUND, "fifo", 3).hit_blocks == 6


def test_belady_by_hand():
    # 3 is never wanted again and leaves as it comes, 1 is not wanted after the third request. Of 2 blocks that remain
    # with 0 in a tier of 2: after the first request 1 (wanted third) stays; 2 (wanted fifth) goes at once.
    assert rate(ROUND, "belady", 3).hit_blocks == 1 + 2 + 1 + 2
    # Room for 2: | 0; 2 bypasses | 0 1; | 0 | 0 hit, 2 gone: 1 + 2 + 1 + 1.
    assert rate(ROUND, "belady", 2).hit_blocks == 5


def test_unbounded_by_hand():
    assert rate(ROUND, "unbounded", 1).hit_blocks == 6
    assert rate(ROUND, "unbounded", 1).capacity_tokens is None


def test_only_the_leading_run_counts():
    # 0 1 2, then 3 pushes out what was touched first: 2, of a tier of 3. 0 1 of the same three are hit.
    requests = [ask(0, 0, 1, 2), ask(1, 3), ask(2, 0, 1, 2)]
    assert rate(requests, "lru", 3).hit_blocks == 2
    # A tail that stays after a lost head is no hit: fifo drops 2 and 1 for 4 and 3, with 0; then 0 for 5.
    requests = [ask(0, 0, 1), ask(1, 2, 3), ask(2, 1, 0)]
    assert rate(requests, "fifo", 3).hit_blocks == 0


def test_tokens_of_a_block_that_is_not_full_count_as_they_are():
    requests = [ask(0, 0, 1, rest=500), ask(1, 0, 1, rest=500)]
    found = rate(requests, "lru", 2)
    assert (found.hit_blocks, found.hit_tokens, found.tokens) == (2, 524, 1048)


@pytest.mark.parametrize(("rest", "room"), [(0, 272 + 256), (1, 272 + 272)])
def test_coded_blocks_take_less_room_but_for_the_servers_first_and_open_block(rest, room):
    """Half of 512 tokens, and 16 more for 32 of them that stay raw: of a prompt's first block, and of one not full."""
    requests = [ask(0, 0, 1, rest=rest), ask(1, 0, 1, rest=rest)]
    found = [hit_rate(requests, "lru", tokens, codec=CodedKV(2.0)).hit_blocks for tokens in (room, room - 1)]
    assert found == [2, 1]


def test_what_warms_up_is_not_counted():
    found = hit_rate(ROUND, "lru", 3 * BLOCK_TOKENS, first=2)
    assert (found.hit_blocks, found.blocks) == (4, 6)


def test_sessions_are_found_by_the_end_of_what_was_asked_before():
    finder = SessionFinder()
    assert finder.find([0]) is None  # too short to be known again
    assert finder.find([0, 1, 2]) == 0
    assert finder.find([0, 1, 3]) == 1  # parts before that end
    assert finder.find([0, 1, 2, 4]) == 0
    assert finder.find([0, 1, 2, 5]) == 2  # a second branch: the end has moved on
    assert finder.find([0, 1, 2, 4]) == 0  # again
    assert finder.forget_oldest(2) == 1
    assert finder.forget_oldest(2) is None
    assert finder.find([0, 1, 3]) == 3


# --- the server's own policy ------------------------------------------------------------------------------------------


def chats(rng, count):
    """Every other conversation goes on three times, a minute apart; the others, with much longer prompts, never do."""
    requests, names = [], iter(range(1, 10**9))
    for number in range(count):
        at_s, goes_on = 4.0 * number, number % 2 == 0
        blocks = [0, *(next(names) for _ in range(4 if goes_on else 30))]
        for _ in range(4 if goes_on else 1):
            requests.append(ask(at_s, *blocks))
            blocks = [*blocks, next(names)]
            at_s += rng.uniform(50, 70)
    return sorted(requests, key=lambda request: request.at_s)


def test_the_default_learns_who_comes_back():
    requests = chats(random.Random(1), 400)
    first = len(requests) // 2
    lru, ours, best = (
        hit_rate(requests, policy, 130 * BLOCK_TOKENS, first).block_hit_rate for policy in ("lru", "default", "belady")
    )
    assert lru < 0.2
    assert ours > lru + 0.5 * (best - lru)


REQUESTS = st.lists(
    st.tuples(st.floats(0, 100), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 511)), max_size=25
)


@given(rows=REQUESTS, blocks=st.integers(1, 12))
def test_no_policy_hits_more_than_there_is(rows, blocks):
    # A name stands for a block with all before it: prefixes of a tree.
    requests = [
        ask(at_s, *(int("1" + "".join(map(str, path[:n])), 5) for n in range(1, len(path) + 1)), rest=rest)
        for at_s, path, rest in sorted(rows)
    ]
    limit = rate(requests, "unbounded", 1).hit_blocks
    for policy in ("lru", "fifo", "default", "belady"):
        assert rate(requests, policy, blocks).hit_blocks <= limit
        assert rate(requests, policy, 200).hit_blocks == limit


# --- the command ------------------------------------------------------------------------------------------------------


def write(path, requests):
    rows = [
        {
            "timestamp": request.at_s * 1000,
            "input_length": request.prompt_tokens,
            "output_length": request.answer_tokens,
            "hash_ids": list(request.block_names),
        }
        for request in requests
    ]
    path.write_text("\n".join(map(json.dumps, rows)))


def test_the_command_writes_what_it_shows(tmp_path):
    write(tmp_path / "trace.jsonl", ROUND)
    words = ["simulate", "--trace", str(tmp_path / "trace.jsonl"), "--capacity-tokens", "1536,1024"]
    words += [
        "--policies",
        "lru, belady,lru",
        "--out",
        str(tmp_path / "out.json"),
        "--figure",
        str(tmp_path / "out.png"),
    ]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "out.json").read_text())
    assert [(row["policy"], row["capacity_tokens"], row["block_hit_rate"]) for row in result["policies"]] == [
        ("lru", 1536, 0.5), ("lru", 1024, 0.4), ("belady", 1536, 0.6), ("belady", 1024, 0.5),
    ]  # fmt: skip
    assert "0.6000" in done.output
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    done = CliRunner().invoke(cli, [*words, "--codec-ratio", "4"])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["codec_ratio"] == 4.0
    # All that comes again is still there.
    assert [row["block_hit_rate"] for row in result["policies"]] == [0.6] * 4


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"--policies": "lru,magic"}, "no policy magic"),
        ({"--capacity-tokens": "100"}, "at least one block"),
        ({"--capacity-tokens": "many"}, "many"),
        ({"--trace": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"--score-from": "1"}, "none is left"),
        ({"--codec-ratio": "inf"}, "inf times smaller"),
        ({"--codec-gb-per-s": "1"}, "no effect with --trace"),
    ],
)
def test_what_cannot_be_simulated_is_said(tmp_path, change, complaint):
    write(tmp_path / "trace.jsonl", ROUND)
    options = {"--trace": str(tmp_path / "trace.jsonl"), "--capacity-tokens": "1024", **change}
    done = CliRunner().invoke(cli, ["simulate", *(word for pair in options.items() for word in pair)])
    assert done.exit_code == 2
    assert complaint in done.output


# --- recorded traces, where they are at hand --------------------------------------------------------------------------


@pytest.mark.bench
@pytest.mark.parametrize(
    ("name", "millions", "expected"),
    [
        ("mooncake_conversation", 1, {"lru": 0.0540, "fifo": 0.0527, "belady": 0.2482, "unbounded": 0.3588}),
        ("mooncake_conversation", 5, {"lru": 0.2044, "fifo": 0.1792, "belady": 0.3588}),
        ("mooncake_synthetic", 0.5, {"lru": 0.0899, "fifo": 0.0916, "belady": 0.2700, "unbounded": 0.6445}),
    ],
)
def test_recorded_traces(name, millions, expected):
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip("the traces are not at hand")
    requests = traces.read(path)
    for policy, rate_expected in expected.items():
        assert hit_rate(requests, policy, int(millions * 1e6)).block_hit_rate == pytest.approx(rate_expected, abs=0.002)


def test_the_names_of_policies_are_told():
    assert {"default", "lru", "fifo", "belady", "unbounded"} <= set(hit_tables.KNOWN)
