"""A disk that is smaller than DRAM."""

from tests.cache.pool_model import PoolModel, make_manager
from tests.cache.test_scores import tokens


def test_what_leaves_a_full_disk_is_not_written_again_at_the_expense_of_others():
    manager = make_manager(num_pages=20, contiguous=False, dram_slots=40, disk_bytes=26_000)  # two turns
    model = PoolModel(manager)
    for n in range(4):
        model.run(f"r{n}", tokens(n, 65), session=f"s{n}")
    model.settle()  # an idle server comes to rest
    assert manager.stats.evictions["disk"] > 0
    assert manager.lower.in_flight == 0
