from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.scheduler.queues.fair_share import FairShare
from tests.conftest import make_sequence
from tests.example_counts import examples


def make_share(costs=None):
    return FairShare(cost=lambda sequence: (costs or {}).get(sequence.request_id, 10))


def add(share, name, tenant="", weight=1.0, place=0.0):
    """Requests with equal places go in order of arrival."""
    sequence = make_sequence(name, 4, tenant=tenant, weight=weight)
    share.add(sequence, place)
    return sequence


def take(share):
    sequence = share.first()
    share.take(sequence)
    return sequence


def names(sequences):
    return [sequence.request_id for sequence in sequences]


def test_one_tenant_is_first_come_first_served():
    share = make_share({"b": 1, "a": 100})
    for name in "abc":
        add(share, name)
    assert names(share.upcoming().members) == ["a", "b", "c"]


def test_tenants_take_turns():
    share = make_share()
    for n in range(4):
        add(share, f"a{n}", "a")
    add(share, "b0", "b")
    add(share, "b1", "b")
    assert names(share.upcoming().members) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_tenant_who_comes_late_is_next_and_has_saved_nothing_up():
    share = make_share()
    for n in range(9):
        add(share, f"a{n}", "a")
    for _ in range(5):
        take(share)
    for n in range(3):
        add(share, f"b{n}", "b")
    assert names(share.upcoming().members) == ["b0", "a5", "b1", "a6", "b2", "a7", "a8"]


def test_shares_are_in_tokens():
    share = make_share({f"a{n}": 30 for n in range(9)})
    for n in range(9):
        add(share, f"a{n}", "a")
        add(share, f"b{n}", "b")
    assert names(share.upcoming().members)[:8] == ["a0", "b0", "b1", "b2", "a1", "b3", "b4", "b5"]


def test_a_heavier_request_costs_its_tenant_less():
    share = make_share()
    for n in range(4):
        add(share, f"a{n}", "a", weight=2.0)
        add(share, f"b{n}", "b")
    assert names(share.upcoming().members) == ["a0", "b0", "a1", "b1", "a2", "a3", "b2", "b3"]


def test_within_a_tenant_the_order_is_that_of_places():
    share = make_share()
    late, *_ = [add(share, f"a{n}", "a", place=float(9 - n)) for n in range(3)]
    add(share, "b", "b")
    assert names(share.upcoming().members) == ["a2", "b", "a1", "a0"]
    share.move(late, 0.0)
    assert names(share.upcoming().members) == ["a0", "b", "a2", "a1"]
    assert [take(share).request_id for _ in range(4)] == ["a0", "b", "a2", "a1"]


def test_a_guess_is_settled_when_the_truth_is_known():
    costs = {}
    share = make_share(costs)
    for n in range(3):
        add(share, f"a{n}", "a")
        add(share, f"b{n}", "b")
    first = take(share)
    costs["a0"] = 25
    share.finished(first)
    share.finished(first)
    assert names(share.upcoming().members) == ["b0", "b1", "b2", "a1", "a2"], "a stands at 25, b at 0, 10 and 20"


def test_tenants_that_have_gone_are_forgotten():
    share = make_share()
    for n in range(100):
        add(share, f"{n}", f"tenant {n}")
    while len(share):
        share.finished(take(share))
    assert not share._tenants


@settings(max_examples=examples(200))
@given(
    costs=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50)), min_size=1, max_size=60),
    weights=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0])] * 3),
)
def test_while_all_have_work_nobody_is_ahead_by_more_than_a_request(costs, weights):
    by_name = {f"{n}": cost for n, (_, cost) in enumerate(costs)}
    share = make_share(by_name)
    left = [0, 0, 0]
    for n, (tenant, _) in enumerate(costs):
        add(share, f"{n}", str(tenant), weights[tenant])
        left[tenant] += 1
    told = names(share.upcoming().members)
    served, taken, most = [0.0] * 3, [], max(by_name.values()) / min(weights)
    live = [tenant for tenant in range(3) if left[tenant]]
    while all(left[tenant] for tenant in live):
        sequence = take(share)
        tenant = int(sequence.tenant)
        taken.append(sequence.request_id)
        left[tenant] -= 1
        served[tenant] += by_name[sequence.request_id] / weights[tenant]
        lead = max(served[tenant] for tenant in live) - min(served[tenant] for tenant in live)
        assert lead <= most
    assert taken == told[: len(taken)]


def recomputed(share):
    starts = []
    for tenant in share._tenants.values():
        begin = tenant.served
        for _, number, entry in tenant.waiting:
            starts.append((begin, number, entry.sequence))
            begin += entry.cost
    return [sequence for _, _, sequence in sorted(starts, key=lambda start: start[:2])]


@settings(max_examples=examples(150))
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "take", "cancel", "finish", "move"]), st.integers(0, 99)), max_size=80
    )
)
def test_the_order_that_is_told_is_the_order_that_comes(steps):
    share, waiting, gone = make_share({f"{n}": 1 + n * 7 % 40 for n in range(80)}), [], []
    for number, (action, who) in enumerate(steps):
        if action == "add":
            waiting.append(add(share, f"{number}", "abc"[who % 3], (0.5, 1.0, 2.0)[who % 7 % 3], who % 5))
        elif action == "take" and waiting:
            first = share.first()
            assert first is share.upcoming().members[0]
            share.take(first)
            waiting.remove(first)
            gone.append(first)
        elif action == "cancel" and waiting:
            share.remove(waiting.pop(who % len(waiting)))
        elif action == "move" and waiting:
            share.move(waiting[who % len(waiting)], who % 5)
        elif action == "finish" and gone:
            share.finished(gone.pop(who % len(gone)))
        assert list(share.upcoming().members) == recomputed(share)
        assert share.upcoming().version == share.upcoming().version, "nothing has happened"
        assert set(share.upcoming().members) == set(waiting)
        assert len(share) == len(waiting)
    told = share.upcoming()
    assert [take(share) for _ in range(len(share))] == list(told.members)


def test_a_long_line_is_put_in_order_some_steps_after_a_request_has_ended():
    costs = {f"{n}": 10 for n in range(300)}
    share = make_share(costs)
    waiting = [add(share, f"{n}", "ab"[n % 2], 1.0) for n in range(300)]
    gone = [take(share) for _ in range(2)]
    told = share.upcoming()
    costs[gone[0].request_id] = 500  # what it has cost in the end
    share.finished(gone[0])
    assert recomputed(share) != list(told.members)
    assert share.upcoming().version == told.version
    taken = take(share)
    assert taken.tenant == "b", "who is next is known at once"
    assert set(share.upcoming().members) == set(waiting) - {*gone, taken}
    for _ in range(len(share) // 128):
        share.refresh()
    assert list(share.upcoming().members) == recomputed(share)


def test_a_guess_is_settled_by_weight():
    costs = {}
    share = make_share(costs)
    for n in range(3):
        add(share, f"a{n}", "a", weight=2.0)
        add(share, f"b{n}", "b")
    first = take(share)
    costs["a0"] = 24
    share.finished(first)
    assert names(share.upcoming().members) == ["b0", "b1", "a1", "a2", "b2"], (
        "a stands at 24 / 2 = 12, then 17; b at 0, 10, 20"
    )
