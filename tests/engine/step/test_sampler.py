import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from reprise.engine.step.sampler import BadLogits, PenaltyState, Sampler, SampleRow, choice_seed, philox, waits
from tests.conftest import sampling

SAMPLER = Sampler()


def a_row(
    *, seed: int = 1, position: int = 0, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (),
    end_ids: tuple[int, ...] = (), **changes: Any,
) -> SampleRow:  # fmt: skip
    asked = sampling(**changes)
    penalties = PenaltyState.of(asked, prompt)
    for token_id in output:
        if penalties:
            penalties.append(token_id)
    return SampleRow(sampling=asked, seed=seed, position=position, penalties=penalties, end_ids=end_ids)


def tokens_of(logits: Tensor, rows: list[SampleRow]) -> list[int]:
    return [sampled.token_id for sampled in SAMPLER.sample(logits, rows)]


def draws(logits: list[float], count: int, **changes: Any) -> Counter[int]:
    """Tokens at positions 0 .. count - 1 of one choice with the same logits at each."""
    rows = [a_row(position=position, **changes) for position in range(count)]
    return Counter(tokens_of(torch.tensor([logits] * count), rows))


def naive(logits: Tensor, row: SampleRow, prompt: tuple[int, ...], output: tuple[int, ...]) -> int:
    """The contract, word by word, with a full sort."""
    s = row.sampling
    values = logits.float().tolist()
    for token_id, bias in s.logit_bias.items():
        if token_id < len(values):
            values[token_id] = float(np.float32(values[token_id]) + np.float32(bias))
    work = torch.tensor(values)
    for token_id in set(prompt) | set(output):
        if s.repetition_penalty != 1:
            work[token_id] = (
                work[token_id] / s.repetition_penalty if work[token_id] > 0 else work[token_id] * s.repetition_penalty
            )
    for token_id, count in Counter(output).items():
        work[token_id] -= float(np.float32(s.frequency_penalty * count + s.presence_penalty))
    if row.position < s.min_tokens:
        for token_id in row.end_ids:
            work[token_id] = -math.inf
    if s.temperature == 0:
        return int(np.argmax(work.numpy()))
    logprobs = (work / s.temperature).log_softmax(dim=-1).tolist()
    ranking = sorted((i for i in range(len(logprobs)) if logprobs[i] > -math.inf), key=lambda i: (-logprobs[i], i))
    probs = np.exp(np.array([logprobs[i] for i in ranking]))
    kept = len(ranking)
    if s.top_k:
        kept = min(kept, s.top_k)
    if s.top_p < 1:
        total = probs[:kept].cumsum()[-1] if s.top_k else 1.0
        before = np.concatenate([[0.0], probs[:kept].cumsum()[:-1]])
        kept = max(1, int((before < s.top_p * total).sum()))
    kept = min(kept, int((probs >= s.min_p * probs[0]).sum()))
    if s.top_k or s.top_p < 1 or s.min_p:
        return ranking[race(row, ranking[:kept], probs[:kept])[0]]
    start = 0
    for level, floor in enumerate((math.log(1e-4), math.log(1e-6), -math.inf)):
        end = sum(logprobs[token] >= floor for token in ranking)
        rest = 1.0 - probs[:end].sum() if floor > -math.inf else 0.0
        if end > start:
            winner, time = race(row, ranking[start:end], probs[start:end])
            if rest <= 0 or wait(row, (1 << 40) + level) >= time * rest:
                return ranking[start + winner]
        start = end
    return ranking[-1]


def race(row: SampleRow, ids: list[int], probs: Any) -> tuple[int, float]:
    with np.errstate(over="ignore"):  # the least of numbers lets a token wait for ever
        times = [wait(row, token) / p if p else math.inf for token, p in zip(ids, probs, strict=True)]
    return min(range(len(times)), key=times.__getitem__), min(times)


def wait(row: SampleRow, token: int) -> float:
    """SplitMix64 with Python's integers."""
    word = (philox((row.seed, 0), row.position)[0] + (token + 1) * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    word ^= word >> 31
    return -float(np.log(((word >> 11) + 0.5) * 2.0**-53))


VOCAB = 40
# Quarters tie often, and the wide ones push tokens below the first prefix of the ranking.
LOGITS = st.lists(st.integers(-60, 60).map(lambda q: q / 4), min_size=VOCAB, max_size=VOCAB)
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=12).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], SampleRow, tuple[int, ...], tuple[int, ...]]:
    prompt, output = draw(IDS), draw(IDS)
    row = a_row(
        seed=draw(st.integers(0, 2**64 - 1)),
        position=len(output),
        prompt=prompt,
        output=output,
        end_ids=(0, 3),
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 1, 2, 7, VOCAB, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.999999, 0.9, 0.5, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.05, 1.0, 1e-5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -2.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.5, 0.5])),
        logit_bias=draw(st.dictionaries(st.integers(0, VOCAB + 5), st.sampled_from([-100.0, -1.25, 0.5, 100.0]))),
        min_tokens=draw(st.sampled_from([0, 6])),
    )
    return draw(LOGITS), row, prompt, output


UNLIKELY = a_row(seed=35, end_ids=(0, 3), temperature=0.3, top_k=40, logit_bias={8: -100.0, 27: 100.0})  # e^-667


@given(batch=st.lists(cases(), min_size=1, max_size=5))
@example(batch=[([0.0] * VOCAB, UNLIKELY, (), ())])
def test_every_row_of_a_batch_gets_what_a_naive_sampler_gives_it_alone(batch):
    logits = torch.tensor([values for values, *_ in batch])
    before = logits.clone()
    got = tokens_of(logits, [row for _, row, *_ in batch])
    assert got == [naive(logits[i], row, prompt, output) for i, (_, row, prompt, output) in enumerate(batch)]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("gap", [708.0, 708.5, 745.0, 800.0])  # gaps of subnormal probabilities, and of none
def test_a_token_that_is_next_to_impossible_is_never_drawn_and_disturbs_nobody(gap):
    assert draws([0.0, -gap, -1000.0], 200, top_k=2) == {0: 200}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0])  # flat ones need the whole ranking, peaked ones its head
@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 900, "top_p": 0.8}])
def test_a_large_vocabulary_is_sampled_as_naively(dtype, spread, filters):
    vocab, count = 12_007, 8  # flat: 8.3e-5 a token, all below the first prefix
    logits = (torch.randn(count, vocab, generator=torch.Generator().manual_seed(3)) * spread).to(dtype)
    rows = [a_row(seed=9, position=i, **filters) for i in range(count)]
    assert tokens_of(logits, rows) == [naive(logits[i], rows[i], (), ()) for i in range(count)]


@pytest.mark.parametrize(
    ("filters", "share"),
    # One token of 0.4 and 12,000 of 5e-5; top_k 4,001 leaves 0.2 of the tail's 0.6, top_p 0.8 leaves 0.4.
    [({}, 0.4), ({"min_p": 5e-5}, 0.4), ({"top_k": 12_001}, 0.4), ({"top_k": 4_001}, 0.4 / 0.6), ({"top_p": 0.8}, 0.5)],
)
def test_a_tail_of_unlikely_tokens_keeps_its_weight(filters, share):
    """Tokens too unlikely for the first look at the ranking together weigh more than the likely one."""
    count = 200
    logits = torch.tensor([math.log(0.4)] + [math.log(5e-5)] * 12_000).expand(count, -1)
    seen = Counter(tokens_of(logits, [a_row(seed=3, position=i, **filters) for i in range(count)]))
    # 4 standard deviations of 200 draws at one half are 0.14
    assert seen[0] / count == pytest.approx(share, abs=0.14)
    assert max(n for token, n in seen.items() if token) < 4


def test_a_row_gets_the_same_token_in_any_company():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 1003, generator=generator) * 2
    rows = [
        a_row(seed=5, position=7),
        a_row(seed=6, position=1, temperature=0.7, top_p=0.9),
        a_row(temperature=0.0),
        a_row(temperature=0.0, logit_bias={4: 3.0}),
        a_row(seed=2, temperature=1.3, top_k=20, prompt=(1, 2), repetition_penalty=1.2, logprobs=3),
        a_row(seed=2, min_p=0.1),
        a_row(seed=8, position=2, min_tokens=4, end_ids=(3,), logprobs=0),
        a_row(seed=8, position=3, presence_penalty=1.0, output=(5, 5, 6)),
        a_row(seed=11, position=2**40),
    ]
    together = SAMPLER.sample(logits, rows)
    alone = [SAMPLER.sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    reversed_ = SAMPLER.sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == reversed_


def chi_square(seen: Counter[int], expected: dict[int, float], count: int) -> float:
    assert set(seen) <= set(expected)
    return sum((seen[token] - p * count) ** 2 / (p * count) for token, p in expected.items())


# 99.9 % points of chi-square with 1, 2, 3 degrees of freedom: 10.83, 13.82, 16.27. The seeds are fixed, so this either
# always passes or always fails.
@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("changes", "expected", "limit"),
    [
        ({}, {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.1}, 16.27),
        # p^(1 / 0.5): 16, 9, 4, 1 of 30
        ({"temperature": 0.5}, {0: 16 / 30, 1: 9 / 30, 2: 4 / 30, 3: 1 / 30}, 16.27),
        ({"top_k": 3}, {0: 4 / 9, 1: 3 / 9, 2: 2 / 9}, 13.82),
        ({"top_p": 0.69}, {0: 4 / 7, 1: 3 / 7}, 10.83),  # 0.4 < 0.69 <= 0.7
        ({"min_p": 0.6}, {0: 4 / 7, 1: 3 / 7}, 10.83),  # 0.6 x 0.4 = 0.24 lies between 0.3 and 0.2
        # of the top 3, 4/9 + 3/9 = 0.78 >= 0.7, though 0.7 of everything would need all 0.7 = 0.4 + 0.3 as well
        ({"top_k": 3, "top_p": 0.7}, {0: 4 / 7, 1: 3 / 7}, 10.83),
        ({"top_k": 3, "top_p": 0.78}, {0: 4 / 9, 1: 3 / 9, 2: 2 / 9}, 13.82),
    ],
)
def test_tokens_come_as_often_as_their_probability_says(changes, expected, limit):
    count = 6000
    seen = draws([math.log(p) for p in (0.4, 0.3, 0.2, 0.1)], count, seed=choice_seed(2024, 0), **changes)
    assert chi_square(seen, expected, count) < limit


def test_waits_are_exponential_over_ids_positions_and_seeds():
    # 16 cells of equal weight, 15 degrees of freedom: 99.9 % point 37.7
    one = np.array([7])
    for times in (
        waits(1, 0, np.arange(8000)),
        np.concatenate([waits(1, i, one) for i in range(8000)]),
        np.concatenate([waits(choice_seed(1, i), 0, one) for i in range(8000)]),
    ):
        cells = Counter((16 * np.exp(-times)).astype(int).tolist())
        assert chi_square(cells, dict.fromkeys(range(16), 1 / 16), 8000) < 37.7


def test_waits_of_neighbouring_ids_and_positions_do_not_hang_together():
    table = np.array([waits(3, position, np.arange(400)) for position in range(400)])
    for left, right in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1])):
        # 160,000 pairs: four standard deviations are 0.01
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.01


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.95}, {"top_k": 200}, {"temperature": 1.5}])
@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_a_draw_survives_another_rounding_of_the_logits(filters, spread):
    """A prompt that is computed in other pieces has logits that differ in the last bits. Ranks of unlikely tokens
    change with them, and sums over them."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(400, 5000, generator=generator) * spread
    rounded = logits + torch.randn(400, 5000, generator=generator) * 1e-5
    rows = [a_row(seed=21, position=i, **filters) for i in range(400)]
    assert tokens_of(logits, rows) == tokens_of(rounded, rows)


@given(key=st.tuples(*[st.integers(0, 2**64 - 1)] * 2), counter=st.integers(1, 2**64 - 1))
def test_philox_is_the_published_one(key, counter):
    # numpy steps the counter before it draws
    theirs = np.random.Philox(
        key=np.array(key, dtype=np.uint64), counter=np.array([counter - 1, 0, 0, 0], dtype=np.uint64)
    )
    assert list(philox(key, counter)) == theirs.random_raw(4).tolist()


def test_choices_of_a_request_differ_and_repeat():
    logits = torch.zeros(1, 1000)

    def text(seed: int, choice: int) -> list[int]:
        return [tokens_of(logits, [a_row(seed=choice_seed(seed, choice), position=i)])[0] for i in range(8)]

    assert text(7, 0) == text(7, 0)
    assert len({tuple(text(seed, choice)) for seed in (7, 8, 2**64 - 1) for choice in range(4)}) == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lowest_id_wins_a_tie(dtype):
    logits = torch.zeros(2, 5003, dtype=dtype)
    logits[0, [4999, 77, 3000]] = 2.0
    logits[1, 1:] = 1.0
    plain = [a_row(temperature=0.0), a_row(temperature=0.0, logprobs=2)]
    assert tokens_of(logits, plain) == [77, 1]
    assert [token for token, _ in SAMPLER.sample(logits, plain)[1].logprob.top] == [1, 2]
    biased = [a_row(temperature=0.0, logit_bias={5: 2.0}), a_row(temperature=0.0, logit_bias={1: -1.0})]
    assert tokens_of(logits, biased) == [5, 2]
    assert tokens_of(logits, [a_row(top_k=1, seed=seed) for seed in (1, 2)]) == [77, 1]
    assert set(tokens_of(logits[:1].expand(50, -1), [a_row(top_k=2, position=i) for i in range(50)])) == {77, 3000}


# Logits 2, 2, -1, 0.5; prompt 0 0, output 2 3 3. Repetition 2 makes them 1, 2, -2, 0.25 (id 1 was not seen); frequency
# 0.5 and presence 0.25 count the output alone: id 2 loses 0.75, id 3 loses 1.25. Together 1, 2, -2.75, -1.
@pytest.mark.parametrize(
    ("bias", "best"),
    [
        ({}, 1),
        ({1: -0.9}, 1),  # 1.1 against 1
        ({1: -1.1}, 0),  # 0.9 against 1
        ({1: -9.0, 0: 6.0, 3: 6.0}, 0),  # bias goes first: 8 / 2 = 4 against 6.5 / 2 - 1.25 = 2
        ({1: -9.0, 0: -3.0, 3: -3.0}, 0),  # -1 x 2 = -2 against -2.75 and -2.5 x 2 - 1.25 = -6.25
        ({1: -9.0, 0: -3.5, 3: -3.0}, 2),  # -1.5 x 2 = -3 against -2.75
    ],
)
def test_penalties_by_hand(bias, best):
    row = a_row(
        prompt=(0, 0), output=(2, 3, 3), repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25,
        temperature=0.0, logit_bias=bias,
    )  # fmt: skip
    assert tokens_of(torch.tensor([[2.0, 2.0, -1.0, 0.5]]), [row]) == [best]


@given(prompt=IDS, output=st.lists(st.integers(0, 500), max_size=200))
def test_counts_kept_incrementally_equal_a_recount(prompt, output):
    state = PenaltyState(prompt_ids=prompt)
    for token_id in output:
        state.append(token_id)
    ids, counts = state.seen
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {
        **dict.fromkeys(prompt, 0.0),
        **Counter(output),
    }


def test_a_choice_without_penalties_keeps_no_state():
    assert PenaltyState.of(sampling(), [1, 2]) is None
    with_presence = PenaltyState.of(sampling(presence_penalty=-0.5), [1, 2])
    assert with_presence is not None
    assert len(with_presence.seen[0]) == 0


def test_no_end_before_min_tokens():
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    early = a_row(temperature=0.0, position=1, min_tokens=2, end_ids=(1,))
    late = a_row(temperature=0.0, position=2, min_tokens=2, end_ids=(1,))
    assert tokens_of(logits, [early]) == [2]
    assert tokens_of(logits, [late]) == [1]
    assert 1 not in draws([0.0, 9.0, 1.0], 50, min_tokens=100, end_ids=(1,))


def test_ids_outside_the_vocabulary_touch_no_other_row():
    logits = torch.zeros(2, 4)
    rows = [
        a_row(temperature=0.0, logit_bias={4: 50.0, 7: 50.0}, min_tokens=1, end_ids=(4, -1)),
        a_row(temperature=0.0, logit_bias={-1: 50.0}),
    ]
    assert tokens_of(logits, rows) == [0, 0]


@pytest.mark.parametrize("count", [0, 1, 5, 20, 300])
def test_logprobs_are_of_the_raw_distribution(count):
    logits = (torch.randn(3, 200, generator=torch.Generator().manual_seed(1)) * 4).bfloat16()
    logits[1, 7] = -math.inf
    rows = [
        a_row(temperature=0.0, logprobs=count, logit_bias={5: 100.0}),
        a_row(temperature=1.7, logprobs=count, top_k=3),
        a_row(temperature=0.0),
    ]
    sampled = SAMPLER.sample(logits, rows)
    assert sampled[0].token_id == 5
    assert sampled[2].logprob is None
    for i in (0, 1):
        raw = logits[i].double()
        exact = raw - raw.logsumexp(dim=-1)
        logprob = sampled[i].logprob
        assert logprob is not None
        assert logprob.logprob == pytest.approx(exact[sampled[i].token_id].item(), abs=1e-5)
        ranking = sorted((t for t in range(200) if exact[t] > -math.inf), key=lambda t: (-exact[t].item(), t))
        assert [token for token, _ in logprob.top] == ranking[:count]
        assert [value for _, value in logprob.top] == pytest.approx(
            [exact[t].item() for t in ranking[:count]], abs=1e-5
        )


def test_each_row_gets_the_number_of_logprobs_it_asked_for():
    rows = [a_row(logprobs=n) for n in (3, 0, 7)]
    sampled = SAMPLER.sample(torch.randn(3, 50), rows)
    assert [len(one.logprob.top) for one in sampled if one.logprob] == [3, 0, 7]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_unusable_rows_are_named_and_the_rest_can_go_on(temperature, bad):
    logits = torch.zeros(4, 10)
    logits[1, 3] = bad
    logits[3] = -math.inf
    logits[2, 5] = -math.inf  # one forbidden token is no error
    rows = [a_row(temperature=temperature, position=i) for i in range(4)]
    with pytest.raises(BadLogits) as raised:
        SAMPLER.sample(logits, rows)
    assert raised.value.rows == (1, 3)
    good = [0, 2]
    assert len(SAMPLER.sample(logits[good], [rows[i] for i in good])) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_every_token_is_masked_is_named_by_its_place_in_the_batch(temperature):
    rows = [a_row(temperature=0.0), a_row(temperature=temperature, min_tokens=1, end_ids=(0, 1, 2))]
    with pytest.raises(BadLogits) as raised:
        SAMPLER.sample(torch.zeros(2, 3), rows)
    assert raised.value.rows == (1,)


def test_a_tiny_temperature_is_greedy_and_a_large_one_flat():
    logits = [50.0, 49.0, -50.0]
    assert set(draws(logits, 50, temperature=1e-30)) == {0}
    assert set(draws(logits, 200, temperature=1e6)) == {0, 1, 2}


def test_the_shape_must_fit():
    with pytest.raises(ValueError, match=r"\[2, vocab\]"):
        SAMPLER.sample(torch.zeros(3, 5), [a_row(), a_row()])
    assert SAMPLER.sample(torch.zeros(0, 5), []) == []


@pytest.mark.gpu
def test_cuda_gives_the_tokens_of_the_cpu():
    logits = (torch.randn(6, 30_000, generator=torch.Generator().manual_seed(2)) * 3).bfloat16()
    rows = [
        a_row(temperature=0.0),
        a_row(temperature=0.0, logprobs=5, logit_bias={3: 4.0}),
        a_row(seed=1, top_p=0.9, logprobs=2),
        a_row(seed=2, top_k=40, output=(1, 2), frequency_penalty=0.5),
        a_row(seed=3),
        a_row(seed=4, min_p=0.05, min_tokens=3, end_ids=(2,)),
    ]
    on_cpu, on_cuda = SAMPLER.sample(logits, rows), SAMPLER.sample(logits.cuda(), rows)
    assert [one.token_id for one in on_cpu] == [one.token_id for one in on_cuda]
    for ours, theirs in zip(on_cpu, on_cuda, strict=True):
        assert (ours.logprob is None) == (theirs.logprob is None)
        if ours.logprob and theirs.logprob:
            assert theirs.logprob.logprob == pytest.approx(ours.logprob.logprob, abs=1e-4)
