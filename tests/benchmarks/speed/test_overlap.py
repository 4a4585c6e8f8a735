"""Tests what the benchmark of loading during computation concludes."""

from benchmarks.speed import overlap


def test_only_the_stated_arm_is_held_against_the_share_to_hide():
    arms = [
        {"disk_gbps": gbps, "new_tokens": new, "read_buffer_layers": layers, "hidden": {"median": hidden}}
        for gbps, new, layers, hidden in (
            (0.15, 100, 5, 0.1),
            (0.4, 20, 5, 0.2),
            (0.4, 100, 0, 0.3),
            (0.4, 100, 5, 0.9),
        )
    ]
    assert list(overlap.verdicts(arms).values()) == [True]
    arms[-1]["hidden"]["median"] = 0.89
    assert list(overlap.verdicts(arms).values()) == [False]
