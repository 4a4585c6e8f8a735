from reprise.cache.moves import AbandonLoad, FinishLoad, Orders


def test_moves_are_taken_once_in_the_order_of_the_decisions():
    orders = Orders()
    first, second = FinishLoad(orders.next_job()), AbandonLoad(orders.next_job())
    orders.add(second)
    orders.add(first)
    assert orders.take() == [second, first]
    orders.add(first)
    assert orders.take() == [first]
    assert orders.take() == []


def test_no_two_jobs_have_one_number():
    orders = Orders()
    assert len({orders.next_job() for _ in range(100)}) == 100
