"""Tests how the KV of a step is captured on its way to DRAM."""

import torch

from reprise.cache.transfer.capture import Captured, CaptureSink


def test_what_layers_show_is_kept_for_the_step_that_runs():
    sink, rows = CaptureSink(), torch.ones(3, 2, 4)
    sink.step = captured = Captured()
    sink.write(1, 2 * rows, 3 * rows)
    assert captured.layers == [1]
    assert torch.equal(captured.keys[0], 2 * rows)
    assert torch.equal(captured.values[0], 3 * rows)


def test_between_steps_it_is_for_nobody():
    sink, rows = CaptureSink(), torch.ones(3, 2, 4)
    sink.write(0, rows, rows)
    assert sink.step is None


def test_inputs_of_layers_are_kept_as_rows_of_one_part() -> None:
    sink, x = CaptureSink(), torch.arange(12.0).view(3, 4)
    sink.write_input(0, x)  # for nobody
    sink.step = captured = Captured()
    for layer in range(2):
        sink.write_input(layer, x + layer)
    assert captured.layers == [0, 1]
    assert captured.num_layers == 2
    assert captured.num_rows == 3
    assert [part.shape for part in captured.parts] == [(3, 1, 4)] * 2
    assert torch.equal(captured.parts[1][:, 0], x + 1)
