"""Tests which rows of a block that is being computed are saved, and from where."""

from tests.cache.pool_model import PoolModel, make_manager


def test_where_bits_count_a_slot_that_costs_the_rows_before_theirs_is_given_back():
    """An open block lies in the last slot that may leave. The turn that goes on in it takes that very slot."""
    manager = make_manager(num_pages=8, dram_slots=2, disk_bytes=1 << 20, free_buffer=0.0, exact=True)
    model = PoolModel(manager)
    model.run("first", range(40))
    model.settle()
    assert manager.tiers.dram.rows.num_free == 0
    model.open("second", [*range(40), 500, 501])
    assert manager.view.admit("second", 2) == 40
    assert model.step("second", 2)
    model.settle()  # asserts that no key is rounded twice
    model.close("second")
    model.settle()


def test_where_bits_count_a_block_goes_on_from_a_slot_that_is_still_being_sealed() -> None:
    """A turn, or the rest of one behind a cut, may come before its open block is in DRAM: nothing is computed again."""
    model = PoolModel(make_manager(num_pages=8, dram_slots=8, exact=True))
    model.run("first", range(40))  # its saves have not ended
    assert not any("dram" in row.copies for row in model.manager.tiers.table)
    model.open("second", [*range(40), 500, 501])
    assert model.manager.view.admit("second", 2) == 40
    assert model.step("second", 2)
    model.settle()  # asserts what slots were filled from
    model.close("second")
    model.settle()
