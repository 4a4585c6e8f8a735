"""Tests the counts of a traced turn, by hand-worked cases, and that a process logs the files it enters."""

import json
import os
import subprocess
import sys
import time

from benchmarks.harness import call_log
from benchmarks.harness.call_log import LANDMARKS, ROOT
from benchmarks.harness.trace_turn import HANDED_OVER, STEP, ProcessLog, read_logs, summarize

LOOP, ENGINE, MODEL = "engine/process/loop.py", "engine/engine.py", "engine/model/hf_model.py"


def step(*inner: tuple[str, str]) -> list[tuple[int, str, str]]:
    return [(1, ENGINE, STEP), *((1, file, function) for file, function in inner)]


def test_the_turn_its_legs_and_its_spine():
    http = ProcessLog(
        [(1, "app/api/chat/route.py", "chat"), (2, "app/text/template.py", "render"),
         (1, "app/turn/service.py", "post"), (2, "app/turn/service.py", "ask"),
         (1, "engine/process/child.py", HANDED_OVER),
         (1, "app/http/event_stream.py", "send"), (1, "fleet/protocol.py", "encode_frame")],
        {LANDMARKS[1]: ["app/cli/program.py", "app/api/chat/route.py", "app/turn/service.py"]},
    )  # fmt: skip
    engine = ProcessLog(
        [*step((MODEL, "forward")), *step((MODEL, "forward")), *step((MODEL, "forward"), ("cache/manager.py", "grow")),
         *step((MODEL, "forward")), *step()],
        {LANDMARKS[-1]: [LOOP, ENGINE]},
    )  # fmt: skip
    found = summarize(http, engine)
    assert found["turn_files"] == 6 + 3
    assert (found["to_the_engine"]["files"], found["http_process"]["files"]) == (4, 6)
    assert found["http_leg"]["by_file"] == {
        "app/api/chat/route.py": 1, "app/turn/service.py": 1, "engine/process/child.py": 1,
    }  # fmt: skip
    assert found["of_the_fleet"] == ["fleet/protocol.py"]
    assert found["decode_step_files"] == [2, 3, 2]
    assert found["decode_step"]["files"] == 2
    assert found["spine"] == ["app/api/chat/route.py", "app/turn/service.py", LOOP, ENGINE]
    assert found["not_entered"] == [name for name in LANDMARKS if name not in (LANDMARKS[1], LANDMARKS[-1])]


def test_a_landmark_is_a_function_that_there_is():
    for landmark in LANDMARKS:
        file, function = landmark.split(":")
        assert f"def {function.split('.')[-1]}(" in (ROOT / file).read_text(encoding="utf-8"), landmark


def test_processes_log_what_they_enter_while_the_switch_is_on(tmp_path):
    code = """
import sys, time
from reprise.cache.blocks.keys import token_bytes
token_bytes([1])
print("ready", flush=True)
for _ in sys.stdin:
    token_bytes([2])
    print("done", flush=True)
"""
    environment = {**os.environ, **call_log.prepare(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        call_log.turn(tmp_path, call_log.ON)
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        call_log.turn(tmp_path, call_log.WRITE)
        while not (files := list(tmp_path.glob("*.json"))):
            assert process.poll() is None
            time.sleep(0.01)
        process.stdin.close()
    content = json.loads(files[0].read_text())
    assert [(file, function) for _, file, function in content["entries"]] == [("cache/blocks/keys.py", "token_bytes")]
    # It is told apart from the engine by its command.
    engine = tmp_path / "1.json"
    engine.write_text(
        json.dumps({**content, "command": ["python", "-m", "reprise.engine.process.loop"], "entries": []})
    )
    http_log, engine_log = read_logs(tmp_path)
    assert (len(http_log.entries), len(engine_log.entries)) == (1, 0)
