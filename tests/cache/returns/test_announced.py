"""Tests which announced sessions are kept, and for how long."""

from reprise.cache.returns.announced import Announced


def of(tenant, number=0):
    return tenant, "", f"s{number}"


def test_a_burst_of_one_tenant_costs_only_that_tenant():
    announced = Announced()
    announced.add(of("quiet"), 0.0)
    for number in range(1000):
        announced.add(of("loud", number), float(number) / 1000)
    assert len(announced) == 64
    assert announced.names == (of("quiet"), *(of("loud", number) for number in range(937, 1000)))
    assert announced.next() == of("quiet")
    announced.served(of("quiet"))
    assert announced.next() == of("loud", 937)


def test_an_announcement_lasts_a_minute_from_the_last_time_it_was_made():
    announced = Announced()
    announced.add(of("a"), 0.0)
    announced.add(of("b"), 10.0)
    announced.served(of("a"))
    announced.add(of("a"), 30.0)
    assert announced.next() == of("b")
    announced.expire(70.0)
    assert announced.names == (of("a"),)
    assert announced.next() == of("a"), "what was in DRAM may have left it"
    announced.expire(90.0)
    assert not announced
    assert announced.next() is None


def test_a_turn_or_a_deletion_ends_it():
    announced = Announced()
    announced.add(of("a"), 0.0)
    changes = announced.changes
    announced.remove(of("b"))
    assert announced.changes == changes
    announced.remove(of("a"))
    assert announced.changes > changes
    assert (len(announced), announced.next()) == (0, None)
