"""Tests how the KV of a step is captured on its way to DRAM."""

import torch

from cache.transfer.capture import CaptureSink


def test_what_a_failed_step_has_shown_is_not_taken_for_the_next_ones():
    sink, rows = CaptureSink(), torch.ones(3, 2, 4)
    sink.begin()
    sink.write(0, rows, rows)  # then the step fails
    sink.begin()
    assert sink.end() is None
    sink.begin()
    sink.write(0, 2 * rows, 3 * rows)
    captured = sink.end()
    assert captured is not None
    assert captured.layers == [0]
    assert torch.equal(captured.keys[0], 2 * rows)
    assert torch.equal(captured.values[0], 3 * rows)


def test_between_steps_nobody_listens():
    sink, rows = CaptureSink(), torch.ones(3, 2, 4)
    sink.write(0, rows, rows)
    assert sink.end() is None
