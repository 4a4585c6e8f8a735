"""Tests what the cache hears of who needs its KV soon."""

import pytest

from tests.scheduler.test_scheduler import make_loop


@pytest.mark.parametrize("scores", [True, False])
def test_the_cache_hears_who_needs_its_kv_only_where_scores_are_on(scores):
    loop = make_loop(max_seqs=1, policy="car", scores=scores)
    loop.add("runs", 4)
    loop.add("waits", 4)
    loop.step()
    assert loop.cache.scores == ({"runs": 2, "waits": 1} if scores else {})
