import logging

import pytest

from reprise.app.observe import loss_log
from reprise.app.observe.loss_log import LossLog
from tests.app.fakes import Running


def test_each_client_and_name_is_logged_once(caplog, monkeypatch):
    log = LossLog()
    log.note("codex", ["tools.web_search", "store"])
    log.note("codex", ["tools.web_search", "input.compaction"])
    log.note("", ["store"])
    assert [record.getMessage() for record in caplog.records] == [
        "codex sends what has no effect here: tools.web_search, store",
        "codex sends what has no effect here: input.compaction",
        "a client sends what has no effect here: store",
    ]
    monkeypatch.setattr(loss_log, "MAX_REMEMBERED", 5)
    caplog.clear()
    log.note("hostile", [f"x{n}" for n in range(1000)])
    log.note("hostile", [f"y{n}" for n in range(1000)])
    assert len(caplog.records) == 1


@pytest.mark.parametrize("agent", ["codex_exec/0.171.0 (Linux) x", "codex_exec"])
async def test_what_a_request_loses_is_logged_under_the_clients_name(running: Running, caplog, agent):
    running.http.headers["user-agent"] = agent
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert "warning" in (await running.chat(**{"frob\nnicate": 1})).headers
    (record,) = [record for record in caplog.records if record.name == loss_log.__name__]
    assert record.getMessage() == "codex_exec sends what has no effect here: frob?nicate"
