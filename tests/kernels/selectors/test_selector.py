"""Tests the arithmetic of choosing: what a row weighs, and which rows are taken."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from reprise.kernels.attention.selection import ALWAYS, LOG2_E, LayerMoments, Selecting, most_rows, strongest, weights
from reprise.kernels.selectors.infinigen import ALPHA, how_many, skew, skewed_weights
from reprise.kernels.selectors.pairs import PAIRS, pair_weights, strongest_pairs


@given(context=st.integers(1, 200_000), share=st.floats(0.001, 1.0))
def test_no_more_rows_than_the_share_or_both_ends_and_one(context: int, share: float) -> None:
    most = most_rows(context, share)
    assert 1 <= most <= context
    assert most <= max(share * context, 2 * ALWAYS + 1)
    assert most >= min(context, int(share * context))


@given(seed=st.integers(0, 1 << 30), rows=st.integers(2 * ALWAYS + 1, 300), share=st.floats(0.05, 1.0))
def test_the_strongest_rows_and_both_ends_are_taken(seed: int, rows: int, share: float) -> None:
    weight = torch.randn(2, rows, generator=torch.Generator().manual_seed(seed))
    most = most_rows(rows, share)
    for own, chosen in zip(weight, strongest(weight, most).tolist(), strict=True):
        assert chosen == sorted(set(chosen))
        assert len(chosen) == most
        ends = {*range(ALWAYS), *range(rows - ALWAYS, rows)}
        assert ends <= set(chosen)
        left_out = set(range(rows)) - set(chosen)
        if left_out:
            assert min(own[list(set(chosen) - ends)]) >= max(own[list(left_out)])


def test_a_row_weighs_what_the_head_that_likes_it_best_gives_it() -> None:
    scores = torch.tensor([[[1.0, 5.0, 3.0], [9.0, 2.0, 8.5]]])  # one kv head, two query heads, three rows
    assert weights(scores).tolist() == [[0.0, 0.0, -0.5]]


def test_partial_scores_are_of_the_given_dims_alone() -> None:
    queries, keys = torch.randn(4, 8), torch.randn(10, 2, 8)
    dims = torch.tensor([[[0, 4], [1, 5]], [[2, 6], [3, 7]]])
    got = pair_weights(queries, keys, dims)
    masked = torch.zeros(2, 8)
    masked[0, [0, 1, 4, 5]] = masked[1, [2, 3, 6, 7]] = 1
    scores = torch.einsum("hgd,thd->hgt", queries.view(2, 2, 8), keys * masked)
    torch.testing.assert_close(got, weights(scores))


def test_the_pairs_in_which_queries_and_keys_are_strong_are_taken() -> None:
    pairs = torch.tensor([[0, 20], [1, 21], [2, 22], *([3 + i, 23 + i] for i in range(17))])
    queries, keys = torch.ones(2, 40), torch.ones(2, 40)
    queries[0, [1, 22]], keys[0, [1, 2]] = 9, 9  # 10 * 10 in the second pair and in the third, 2 * 2 elsewhere
    queries[1, 5] = 9  # 10 * 2
    chosen = strongest_pairs(LayerMoments(queries.diag_embed(), keys.diag_embed(), pairs))
    assert chosen.shape == (2, PAIRS, 2)
    assert {(1, 21), (2, 22)} <= {tuple(pair) for pair in chosen[0].tolist()}
    assert (5, 25) in {tuple(pair) for pair in chosen[1].tolist()}
    assert all(pair in pairs.tolist() for pair in chosen.flatten(0, 1).tolist())


def test_a_context_is_read_in_part_from_the_least_length_on() -> None:
    assert not Selecting(None, 2048).takes(2047)  # type: ignore[arg-type]
    assert Selecting(None, 2048).takes(2048)  # type: ignore[arg-type]
    assert not Selecting(None, 1).takes(4 * ALWAYS - 1)  # type: ignore[arg-type]


def test_a_skew_goes_along_the_strongest_directions_of_queries_and_keys() -> None:
    turn, _ = torch.linalg.qr(torch.randn(20, 20, generator=torch.Generator().manual_seed(0)))
    queries, keys = torch.linspace(0.1, 0.2, 20), torch.ones(20)
    queries[:8] = torch.tensor([9.0, 8, 7, 6, 5, 4, 3, 2])
    keys[[0, 1]] = 1e-6  # strong in queries, but keys have nothing there
    moments = LayerMoments((turn * queries @ turn.T)[None], (turn * keys @ turn.T)[None], torch.empty(0, 2))
    directions = skew(moments)[0]
    assert directions.shape == (20, 6)
    alike = (turn.T @ directions).abs()  # how much each is along each of those that were made
    assert alike[2:8].amax(1).min() > 0.99
    assert alike[:2].max() < 0.1
    rows, query = torch.randn(9, 1, 20), torch.randn(3, 20)
    torch.testing.assert_close(
        skewed_weights(query, rows, turn[None]), weights((query @ rows[:, 0].T)[None]), rtol=1e-4, atol=1e-4
    )


def test_as_many_rows_as_come_near_the_greatest_score_on_average() -> None:
    weight = torch.full((2, 500), -ALPHA * LOG2_E - 0.1)
    weight[0, :30] = weight[1, :10] = -ALPHA * LOG2_E + 0.1
    assert how_many(weight, 400) == 2 * ALWAYS + 20
    assert how_many(weight, 70) == 70
