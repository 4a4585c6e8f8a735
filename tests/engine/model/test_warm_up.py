import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reprise.engine.model.loading import ModelRefused
from reprise.engine.model.warm_up import WarmUp, efficient_tokens


@pytest.mark.parametrize(
    ("fixed_s", "s_per_token", "most", "found"),
    [
        # Tokens a second of 32, 64, ... over that of 512: 0.025 + 512 * 0.00071 s give 1,317, of which 64 give 68 %.
        (0.025, 0.00071, 512, 64),
        (0.025, 0.00009, 512, 256),  # 7,197; 128 give 3,505 and 256 give 5,330
        (0.0, 0.001, 512, 32),
        (0.01, 0.0, 512, 512),
        (0.008, 0.00004, 4096, 512),  # 23,840; 256 give 14,035 and 512 give 17,978
        (0.01, 0.0, 20, 20),
        (0.01, 0.0, 100, 64),
    ],
)
def test_from_how_many_tokens_products_are_efficient(fixed_s, s_per_token, most, found):
    assert efficient_tokens(lambda tokens: fixed_s + s_per_token * tokens, most) == found


def test_a_model_that_takes_long_is_not_asked_for_more():
    asked = []

    def seconds(tokens):
        asked.append(tokens)
        return 0.02 * tokens

    assert efficient_tokens(seconds, 4096) == 32
    assert asked == [32]


@given(most=st.integers(1, 5000), seed=st.lists(st.floats(1e-4, 1.0), min_size=9, max_size=9))
def test_it_is_one_that_was_measured_and_gives_two_thirds_of_the_best(most, seed):
    times = iter(seed)
    rates = {}

    def seconds(tokens):
        took_s = next(times)
        rates[tokens] = tokens / took_s
        return took_s

    found = efficient_tokens(seconds, most)
    assert found <= most
    assert rates[found] >= 2 / 3 * max(rates.values())
    assert all(rate < 2 / 3 * max(rates.values()) for tokens, rate in rates.items() if tokens < found)


class Timed:
    """A model whose steps take `token_s` for each token, the first one longer, on a clock of its own."""

    def __init__(self, monkeypatch, token_s):
        self._token_s, self._now_s, self.asked = token_s, 0.0, []
        monkeypatch.setattr("reprise.engine.model.warm_up.time.perf_counter", lambda: self._now_s)

    def forward(self, batch, arrive):
        self.asked.append(len(batch.token_ids))
        self._now_s += 30.0 if len(self.asked) == 1 else self._token_s * self.asked[-1]
        return torch.zeros(1, 2)


def test_long_steps_are_few_and_not_repeated(monkeypatch):
    model = Timed(monkeypatch, token_s=1.0)
    steps = WarmUp(runner=model, most_rows=500, page_size=16, device=torch.device("cpu"))
    assert steps.step_times() == (pytest.approx(0.0), pytest.approx(1.0))
    assert model.asked == [15, 15, 1, 15, 1]


def test_steps_of_a_fast_model_are_timed_twice_and_with_more_rows(monkeypatch):
    model = Timed(monkeypatch, token_s=0.001)
    steps = WarmUp(runner=model, most_rows=500, page_size=16, device=torch.device("cpu"))
    assert steps.step_times() == (pytest.approx(0.0), pytest.approx(0.001))
    assert model.asked == [15, 15, 128, 1, 128, 128, 1, 1]


class Rows:
    """A model whose logits are tokens and positions. From `odd_from` rows a step on, their last bit is another."""

    def __init__(self, odd_from):
        self._odd_from = odd_from

    def forward(self, batch, arrive):
        logits = torch.stack((batch.token_ids, batch.positions), 1).float()[batch.logit_rows]
        is_odd = self._odd_from <= len(batch.token_ids) < 64
        return logits.nextafter(torch.tensor(torch.inf)) if is_odd else logits


class SmallDevice:
    """Has memory for so many tokens."""

    def __init__(self, most):
        self._most, self.asked = most, []

    def forward(self, batch, arrive):
        self.asked.append(len(batch.token_ids))
        if self.asked[-1] > self._most:
            raise torch.OutOfMemoryError("2 GiB")
        return torch.zeros(1, 2)


@pytest.mark.parametrize(
    ("most", "asked"), [(1000, [160]), (160, [160]), (100, [160, 80]), (39, [160, 80, 40]), (79, [160, 80, 40])]
)
def test_steps_are_halved_until_the_device_has_memory_for_them(most, asked):
    device = SmallDevice(most)
    steps = WarmUp(runner=device, most_rows=500, page_size=64, device=torch.device("cpu"))
    if most < 40:
        with pytest.raises(ModelRefused):
            steps.tokens_that_fit(160)
    else:
        assert steps.tokens_that_fit(160) == asked[-1]
    assert device.asked == asked


@pytest.mark.parametrize(("odd_from", "agree"), [(1000, True), (2, False), (8, False), (20, False)])
def test_rows_agree_where_they_have_the_same_bits_however_many_there_are(odd_from, agree):
    steps = WarmUp(runner=Rows(odd_from), most_rows=200, page_size=64, device=torch.device("cpu"))
    assert steps.rows_agree(32) == agree


def test_rows_for_which_there_is_no_room_are_not_said_to_agree():
    steps = WarmUp(runner=Rows(1000), most_rows=64, page_size=64, device=torch.device("cpu"))
    assert not steps.rows_agree(32)
