import reprise.cache.storage.rare_log as rare_log
from reprise.cache.storage.rare_log import RareLog


def test_one_of_a_kind_in_a_while_with_a_count(monkeypatch, caplog):
    now = 100.0
    monkeypatch.setattr(rare_log.time, "monotonic", lambda: now)
    rare = RareLog(every_s=10.0)
    for n in range(4):
        rare.warn("full", "no room for %d", n)
    rare.warn("io", "broken")
    now = 110.0
    rare.warn("full", "no room for %d", 4)
    rare.warn("full", "no room for %d", 5)
    assert caplog.messages == ["no room for 0", "broken", "no room for 4 (and 3 like it before)"]
