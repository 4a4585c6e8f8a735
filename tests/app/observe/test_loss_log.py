import logging

import pytest

from reprise.app.observe import loss_log
from reprise.app.observe.loss_log import LossLog
from tests.app.fakes import Running


def test_each_client_and_name_is_logged_once(caplog):
    log = LossLog()
    log.note("codex", ["tools.web_search", "store"])
    log.note("codex", ["tools.web_search", "input.compaction"])
    log.note("", ["store"])
    assert [record.getMessage() for record in caplog.records] == [
        "codex sends what has no effect here: tools.web_search, store",
        "codex sends what has no effect here: input.compaction",
        "a client sends what has no effect here: store",
    ]


def test_no_client_can_silence_the_log_for_the_others(caplog):
    log = LossLog()
    for n in range(300):
        log.note("hostile", [f"{n}.{m}" for m in range(100)])
    assert len(caplog.records) == 1  # 64 names, of which a line has ten
    assert caplog.records[0].getMessage().endswith(": " + ", ".join(f"0.{m}" for m in range(10)) + " and 54 more")
    log.note("codex", ["store"])
    log.note("codex", ["store"])
    assert [record.getMessage() for record in caplog.records[1:]] == ["codex sends what has no effect here: store"]


def test_names_of_clients_without_end_take_no_memory_without_end(caplog):
    log = LossLog()
    log.note("first", ["store"])
    for n in range(loss_log.MAX_CLIENTS - 1):
        log.note(f"client {n}", ["store"])
    log.note("first", ["store"])
    assert len(caplog.records) == loss_log.MAX_CLIENTS
    log.note("one more", ["store"])  # the oldest client is forgotten
    log.note("first", ["store"])
    assert len(caplog.records) == loss_log.MAX_CLIENTS + 2


@pytest.mark.parametrize("agent", ["codex_exec/0.171.0 (Linux) x", "codex_exec"])
async def test_what_a_request_loses_is_logged_under_the_clients_name(running: Running, caplog, agent):
    running.http.headers["user-agent"] = agent
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert "warning" in (await running.chat(**{"frob\nnicate": 1})).headers
    (record,) = [record for record in caplog.records if record.name == loss_log.__name__]
    assert record.getMessage() == "codex_exec sends what has no effect here: frob?nicate"
