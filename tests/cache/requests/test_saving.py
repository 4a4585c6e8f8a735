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
    """A turn, or the rest of one after a cut, may come before its open block is in DRAM: nothing is computed again."""
    model = PoolModel(make_manager(num_pages=8, dram_slots=8, exact=True))
    model.run("first", range(40))  # its saves have not ended
    assert not any("dram" in row.copies for row in model.manager.tiers.table)
    model.open("second", [*range(40), 500, 501])
    assert model.manager.view.admit("second", 2) == 40
    assert model.step("second", 2)
    model.settle()  # asserts what slots were filled from
    model.close("second")
    model.settle()


def test_a_turn_that_found_no_slot_is_saved_as_it_ends_in_place_of_what_is_worth_less() -> None:
    """Its blocks wait for no slot to become free: another conversation's have been written meanwhile and may leave."""
    model = PoolModel(make_manager(num_pages=8, dram_slots=2, disk_bytes=1 << 20, free_buffer=0.0))
    manager = model.manager
    model.run("first", range(64), session="a")
    model.move()
    while model.saves:
        model.run_save()
    model.hear()  # both slots hold what is not on disk yet
    model.open("second", range(100, 164), session="b")
    assert manager.view.admit("second", 64) == 0
    assert model.step("second", 64)
    assert not model.contexts["second"].saving.slots
    model.settle()
    assert manager.sessions.blocks_of(("", "", "a")) == {"hbm": 2, "dram": 2, "disk": 2}
    assert manager.tiers.dram.rows.num_free == 0
    model.close("second")
    model.settle()
    assert manager.sessions.blocks_of(("", "", "b")) == {"hbm": 2, "dram": 2, "disk": 2}
