"""Tests which part of which load is next, without threads and bytes."""

import threading

import pytest

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.moves import BlockLoad
from reprise.cache.rates import LoadProgress
from reprise.cache.transfer.device_streams import HostStream
from reprise.cache.transfer.load_queue import LoadJob, LoadPart, LoadQueue

LAYERS, BUFFER = 6, 2
DONE = HostStream().fence()


def part_of(load, *, tier="disk", in_step=False, landed=0, ahead=LAYERS):
    block = BlockLoad(BlockKey(bytes(16)), BLOCK_TOKENS, 0, (7, 0) if tier == "disk" else None, 0, 0, 0)
    part = LoadPart((block,), load, LAYERS, tier=tier, in_step=in_step, landed=landed, ahead=ahead)
    load.parts.append(part)
    return part


@pytest.fixture
def queue():
    return LoadQueue(num_layers=LAYERS, read_buffer_layers=BUFFER, changed=threading.Condition())


def test_a_load_whose_request_runs_goes_ahead_of_earlier_ones(queue):
    early, late = part_of(LoadJob(1, DONE, started=False)), part_of(LoadJob(2, DONE, started=False))
    queue.parts += [early, late]
    assert queue.next_to_read("disk") is early
    assert not queue.gives_way(early)
    late.load.started = True
    assert queue.next_to_read("disk") is late
    assert queue.gives_way(early)
    late.reading = 1
    assert queue.next_to_read("disk") is early
    assert not queue.gives_way(early), "somebody reads the other already"


def test_a_load_that_waits_comes_as_far_as_the_read_buffer_reaches(queue):
    part = part_of(LoadJob(1, DONE, started=False))
    queue.parts.append(part)
    assert queue.may_land(part) == BUFFER
    part.landed = part.placed = BUFFER
    assert queue.next_to_read("disk") is None
    assert queue.next_to_place() is None
    part.load.started = True
    assert queue.may_land(part) == LAYERS - BUFFER
    assert queue.next_to_read("disk") is part


def test_no_more_lands_than_there_is_room_for(queue):
    part = part_of(LoadJob(1, DONE, started=True), ahead=3)
    part.landed, part.placed = 4, 1
    assert queue.may_land(part) == 0
    part.placed = 2
    assert queue.may_land(part) == 1


def test_threads_place_what_has_landed_and_no_step_places(queue):
    part = part_of(LoadJob(1, DONE, started=True), in_step=True, tier="dram", landed=LAYERS)
    queue.parts.append(part)
    assert queue.next_to_place() is None
    part.in_step = False
    assert queue.next_to_place() is part
    assert queue.next_to_read("disk") is None


def test_a_part_that_is_read_while_its_load_fails_is_over_when_the_read_has_ended(queue):
    part = part_of(LoadJob(1, DONE, started=True))
    part.reading = 2
    part.load.failed[BlockKey(bytes(16))] = "checksum"
    assert not part.is_over
    assert part.progress(1.0) is not None, "it may be given up while its end waits for the read"
    part.reading = 0
    assert part.is_over
    assert part.progress(1.0) is None
    part.reading, part.load.is_abandoned = 2, True
    assert part.is_over, "nobody waits for a read of a load that was given up"
    assert part.progress(1.0) is None


def test_a_slow_disk_keeps_nobody_from_redis(queue):
    slow = part_of(LoadJob(1, DONE, started=True))
    remote = part_of(LoadJob(2, DONE, started=True), tier="redis")
    queue.parts += [slow, remote]
    slow.reading = 1
    assert queue.next_to_read("disk") is None
    assert queue.next_to_read("redis") is remote
    assert not queue.gives_way(slow)


def test_progress_counts_the_time_since_the_last_layer_as_silent():
    part = part_of(LoadJob(1, DONE, started=True), landed=2)
    part.reading, part.asked_s, part.reading_s, part.landed_s = 1, 10.0, 0.5, 1.0
    assert part.progress(13.0) == LoadProgress(layers=2, reading_s=1.0, silent_s=2.5)


def test_nothing_left_and_nothing_more_to_come_is_the_end(queue):
    queue.closing = True
    with queue.changed:
        assert queue.wait_next(lambda: queue.next_to_read("disk")) is None


def test_far_parts_are_those_of_one_load_that_no_slot_in_dram_holds(queue):
    load, other = LoadJob(1, DONE, started=True), LoadJob(2, DONE, started=True)
    near, far, foreign = part_of(load, tier="dram"), part_of(load), part_of(other)
    redis = part_of(load, tier="redis")
    queue.parts += [near, far, foreign, redis]
    assert queue.far_parts(load) == [far, redis]
    assert queue.far_parts(other) == [foreign]
    assert queue.far_parts(None) == []
