"""Tests what is concluded of a quiet tenant beside a flood."""

from collections import Counter

import pytest

from benchmarks.scheduling import tenants


@pytest.mark.parametrize(("beside_s", "errors", "held"), [(0.4, 0, [True, True]), (0.41, 1, [False, False])])
def test_the_quiet_tenant_may_lose_three_steps(beside_s, errors, held):
    failed = Counter({"503": errors}) if errors else Counter()
    one = tenants.Round("due", [0.1] * 3, [beside_s] * 20, [1.0], [0.1] * 5, 10.0, failed)
    assert list(tenants.summarize([one])["held"].values()) == held
