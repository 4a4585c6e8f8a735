import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.scheduler.budgets.budget import StepCost, StepWork, TimeBudget, TokenBudget
from tests.example_counts import examples

PRIOR = {
    "fixed_s": 0.01,
    "s_per_token": 0.001,
    "s_per_kilo_pair": 0.0005,
    "s_per_row": 0.002,
    "s_per_kilo_read": 0.0005,
}


def work(prefill=0, rows=0, context=0):
    made = StepWork()
    if prefill:
        made = made.plus_chunk(prefill, context)
    for _ in range(rows):
        made = made.plus_rows([context])
    return made


def truth(terms, made):
    return sum(term * x for term, x in zip(terms, made.features, strict=True))


def random_work(rng):
    return work(rng.choice([0, 1, 2, 4]) * rng.randint(0, 128), rng.randint(0, 16), rng.randint(0, 4000))


@pytest.mark.parametrize("pace", [0.1, 1.0, 20.0])
def test_it_learns_what_steps_cost(pace):
    rng, cost = random.Random(1), StepCost(**PRIOR)
    terms = [pace * t for t in (0.02, 0.0004, 0.0001, 0.003, 0.0005)]
    for _ in range(300):
        made = random_work(rng)
        cost.ran(made, truth(terms, made) * rng.uniform(0.95, 1.05))
    for made in (work(512, 1, 0), work(64, 16, 2000), work(0, 8, 1000)):
        assert cost.seconds(made) == pytest.approx(truth(terms, made), rel=0.15)


def test_a_machine_that_only_decoded_still_knows_that_prompts_cost_something():
    cost = StepCost(**PRIOR)
    for _ in range(500):
        cost.ran(work(0, 4, 100), 0.002)
    assert cost.seconds(work(256)) > cost.seconds(work(0, 4)) / 2


def test_it_follows_a_machine_that_got_slower():
    cost = StepCost(**PRIOR)
    rng = random.Random(2)
    for slow in (1, 3):
        for _ in range(200):
            made = random_work(rng)
            cost.ran(made, slow * truth(PRIOR.values(), made))
    assert cost.seconds(work(256, 4, 500)) == pytest.approx(3 * truth(PRIOR.values(), work(256, 4, 500)), rel=0.05)


@settings(max_examples=examples(200))
@given(
    seed=st.integers(0, 2**16),
    noise=st.floats(0, 3),
    steps=st.integers(0, 40),
    seconds=st.floats(0.0, 10.0),
    context=st.integers(0, 100_000),
)
def test_a_chunk_is_the_largest_that_fits_and_no_term_is_negative(seed, noise, steps, seconds, context):
    rng, cost = random.Random(seed), StepCost(**PRIOR)
    for _ in range(steps):
        cost.ran(random_work(rng), rng.uniform(0.001, 0.001 + noise))
    chunk = cost.chunk_that_fits(seconds, context)
    assert min(cost.current()) >= 0
    assert cost.current()[1] > 0

    def extra(tokens):
        return cost.seconds(work(tokens, 0, context)) - cost.seconds(StepWork()) if tokens else 0.0

    assert chunk >= 0
    assert extra(chunk) <= seconds * (1 + 1e-6) + 1e-9
    assert extra(chunk + 1) >= seconds * (1 - 1e-6) - 1e-9


def test_a_step_is_filled_up_to_its_target():
    cost = StepCost(**PRIOR)
    decodes = work(0, 5, 0)  # 10 + 5 * 2 ms
    budget = TimeBudget(cost=cost, target_s=0.1, decodes=decodes, tokens=500)
    first = budget.chunk(40, 0)
    assert first == 40
    budget.spend(first, 0, ends=True)
    second = budget.chunk(500, 0)
    # 100 ms over the margin of 1.25 leave 60 for tokens at 1 ms, of which 40 are taken, less what they attend to.
    assert 17 <= second <= 20
    budget.spend(second, 0, ends=False)
    assert budget.chunk(500, 0) <= 1


def mixed(rng):
    return work(rng.randint(16, 256), rng.randint(1, 8), rng.randint(0, 4000))


def test_the_margin_is_what_99_of_100_steps_keep():
    rng, cost = random.Random(3), StepCost(**PRIOR)
    for number in range(400):
        made = mixed(rng)
        late = 1.5 if number % 20 == 0 else 1.0
        cost.ran(made, truth(PRIOR.values(), made) * late)
    assert 1.4 <= cost.margin <= 1.6
    for _ in range(200):
        made = mixed(rng)
        cost.ran(made, truth(PRIOR.values(), made))
    assert cost.margin == pytest.approx(1.0, abs=0.05), "and what is long past does not count"


def test_one_step_that_was_held_up_changes_little():
    rng, cost = random.Random(4), StepCost(**PRIOR)
    for number in range(200):
        made = mixed(rng)
        cost.ran(made, truth(PRIOR.values(), made) * (100 if number == 180 else 1))
    for made in (work(256, 4, 0), work(64, 4, 3500)):
        assert cost.seconds(made) == pytest.approx(truth(PRIOR.values(), made), rel=0.05)
    assert cost.margin < 1.1


def test_decoding_for_long_does_not_make_it_forget_what_prompts_cost():
    rng, cost = random.Random(5), StepCost(**PRIOR)
    terms = (0.01, 0.004, 0.0001, 0.002, 0.0005)  # prompts cost four times what the prior says
    for _ in range(100):
        made = mixed(rng)
        cost.ran(made, truth(terms, made))
    for _ in range(2000):
        made = work(0, rng.randint(1, 8), rng.randint(0, 4000))
        cost.ran(made, truth(terms, made))
    assert cost.seconds(work(256, 4, 100)) == pytest.approx(truth(terms, work(256, 4, 100)), rel=0.05)


def test_what_a_step_waits_for_is_no_time_for_tokens():
    def room(wait_s):
        budget = TimeBudget(cost=StepCost(**PRIOR), target_s=0.1, decodes=work(0, 5, 0), tokens=500)
        budget.wait(wait_s)
        return budget.chunk(500, 0)

    assert room(0.025) == pytest.approx(room(0.0) - 20, abs=2)  # 1 ms a token, and the margin of 1.25
    tokens = TokenBudget(10)
    tokens.wait(5.0)
    assert tokens.chunk(30, 0) == 10


@pytest.mark.parametrize(("target_s", "least"), [(0.001, 16), (0.1, 20), (0.5, 98)])  # a fifth, at 1 ms a token
def test_prompts_get_on_however_late_the_step_is(target_s, least):
    budget = TimeBudget(cost=StepCost(**PRIOR), target_s=target_s, decodes=work(0, 300, 0), tokens=500)
    assert budget.chunk(500, 0) == pytest.approx(least, abs=2)
    budget.spend(least, 0, ends=False)
    assert budget.chunk(500, 0) == 0


def test_steps_that_something_else_holds_up_are_not_made_tiny():
    rng, cost = random.Random(6), StepCost(**PRIOR)
    for number in range(300):
        made = mixed(rng)
        cost.ran(made, truth(PRIOR.values(), made) + (1.2 if number % 3 else 0.0))
    budget = TimeBudget(cost=StepCost(**PRIOR), target_s=0.1, decodes=work(0, 4, 0), tokens=500)
    calm = budget.chunk(500, 0)
    held_up = TimeBudget(cost=cost, target_s=0.1, decodes=work(0, 4, 0), tokens=500)
    assert cost.margin <= 2
    assert held_up.chunk(500, 0) >= calm / 8


def test_a_fixed_number_of_tokens():
    budget = TokenBudget(10)
    assert budget.chunk(30, 99) == 10
    budget.spend(7, 0, ends=False)
    assert budget.chunk(2, 0) == 2
    assert budget.chunk(30, 0) == 3
    budget.spend(30, 0, ends=True)
    assert budget.chunk(1, 0) == 0
