import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.scheduler.budgets.budget import StepCost, StepWork
from reprise.scheduler.budgets.priced import PricedBudget

SLOW = {"fixed_s": 0.03, "s_per_token": 1e-3, "s_per_kilo_pair": 1e-4, "s_per_row": 1e-3, "s_per_kilo_read": 6e-4}
FAST = {"fixed_s": 8e-3, "s_per_token": 4e-5, "s_per_kilo_pair": 2e-6, "s_per_row": 3e-5, "s_per_kilo_read": 5e-5}
MACHINES = st.fixed_dictionaries({name: st.floats(1e-7, 0.1) for name in SLOW})


def decodes(rows, context=500):
    return StepWork().plus_rows([context] * rows)


def budget_of(terms, *, rows=2, prompts=2, least=32, most=2048, stretch=1.0):
    return PricedBudget(
        cost=StepCost(**terms), decodes=decodes(rows), prompts=prompts, least_tokens=least, most_tokens=most,
        stretch=stretch,
    )  # fmt: skip


def fill(budget, prompts):
    """[(tokens, of so many, it ends)]: what a step takes of prompts, in this order."""
    taken = []
    for pending in prompts:
        tokens = budget.chunk(pending, 0)
        if not tokens:
            break
        budget.spend(tokens, 0, ends=tokens == pending)
        taken.append((tokens, pending, tokens == pending))
    return taken


@given(
    terms=MACHINES,
    rows=st.integers(0, 40),
    waiting=st.integers(0, 300),
    least=st.integers(0, 3000),
    most=st.integers(1, 4096),
    prompts=st.lists(st.integers(1, 9000), min_size=1, max_size=6),
)
def test_no_chunk_is_inefficient_unless_it_ends_its_prompt(terms, rows, waiting, least, most, prompts):
    budget = budget_of(terms, rows=rows, prompts=waiting + len(prompts), least=least, most=most)
    taken = fill(budget, prompts)
    assert taken, "every step brings a prompt on"
    assert sum(tokens for tokens, _, _ in taken) <= most
    for tokens, _, ends in taken:
        assert ends or tokens >= min(least, most)
    assert all(ends for _, _, ends in taken[:-1]), "the others would be computed later anyway"


@given(terms=MACHINES, rows=st.integers(0, 20), prompts=st.lists(st.integers(1, 3000), min_size=2, max_size=6))
def test_what_is_beside_a_prompt_that_ends_at_most_doubles_its_step(terms, rows, prompts):
    taken = fill(budget_of(terms, rows=rows, prompts=9, most=100_000), prompts)
    cost, work = StepCost(**terms), decodes(rows)
    steps_s = [cost.seconds(work := work.plus_chunk(tokens, 0)) for tokens, _, _ in taken]
    assert all(step_s <= 2 * steps_s[0] * (1 + 1e-6) for step_s in steps_s)


@given(terms=MACHINES, rows=st.integers(1, 30), prompts=st.integers(1, 30), pending=st.integers(1, 9000))
def test_steps_are_no_longer_for_more_readers_and_no_shorter_for_more_who_wait(terms, rows, prompts, pending):
    terms = {**terms, "s_per_row": 0.0, "s_per_kilo_read": 0.0}  # what a step costs is the same for all of them

    def pieces(rows, prompts):
        return -(-pending // budget_of(terms, rows=rows, prompts=prompts, most=10_000).chunk(pending, 0))

    assert pieces(rows + 1, prompts) >= pieces(rows, prompts)
    assert pieces(rows, prompts + 1) <= pieces(rows, prompts)


def test_the_length_is_the_one_that_costs_least():
    """Played: a prompt in even pieces; the wait of all prompts for the steps' rest, and the squares of the gaps."""
    terms, rows, prompts, pending = {**SLOW, "s_per_kilo_pair": 0.0}, 16, 3, 8000
    rest_s = StepCost(**terms).seconds(decodes(rows))

    def price(pieces):
        gap_s = rest_s + terms["s_per_token"] * pending / pieces
        return pieces * (prompts * rest_s + rows * gap_s**2 / (2 * 24.0))

    best = min(range(1, 100), key=price)
    assert -(-pending // budget_of(terms, rows=rows, prompts=prompts).chunk(pending, 0)) == pytest.approx(best, abs=1)


def test_a_fast_machine_keeps_gaps_short_and_a_slow_one_its_chunks_large():
    for readers, gap_s in ((1, 0.3), (8, 0.3), (32, 0.2)):
        tokens = budget_of(FAST, rows=readers, most=16_384).chunk(30_000, 0)
        assert StepCost(**FAST).seconds(decodes(readers).plus_chunk(tokens, 0)) < gap_s
        assert budget_of(FAST, rows=readers, most=16_384).chunk(1000, 0) == 1000
    assert budget_of(SLOW, rows=3).chunk(1000, 0) >= 500


def test_pieces_are_even():
    budget = budget_of(SLOW, rows=3, most=4096)
    first = budget.chunk(2500, 0)
    pieces = round(2500 / first)
    assert 1 < pieces < 6
    assert first == -(-2500 // pieces)


def test_with_nobody_to_read_a_prompt_is_computed_at_once():
    assert budget_of(SLOW, rows=0).chunk(2000, 0) == 2000
    assert budget_of(SLOW, rows=0).chunk(3000, 0) == 2048, "as many as a step may have"


def test_a_step_that_waits_for_a_load_has_less_room_and_one_that_is_stretched_more():
    usual = budget_of(SLOW, rows=8).chunk(100_000, 0)
    waiting = budget_of(SLOW, rows=8)
    waiting.wait(0.1)
    assert waiting.chunk(100_000, 0) == pytest.approx(usual - 100, abs=15)  # 1 ms a token
    assert budget_of(SLOW, rows=8, stretch=1.5).chunk(100_000, 0) > 1.2 * usual
