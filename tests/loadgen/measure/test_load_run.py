"""Tests `reprise load` against a stub, from the command line to the files it writes."""

import asyncio
import gc
import gzip
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.harness.stub_server import Stub
from reprise.loadgen.cli import cli
from reprise.loadgen.measure import load_run
from reprise.loadgen.report import html_page

DOCS = Path(__file__).parents[3] / "docs" / "measuring.md"
QUICK = ["--conversations", "6", "--scale", "0.01", "--think", "fixed:0", "--rate", "500", "--seed", "3"]


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """A run ends by unfreezing what the garbage collector leaves out, with what tests/conftest.py has frozen."""
    yield
    gc.freeze()


class Recorder(Stub):
    """A stub that keeps the bodies it was sent, and can refuse them."""

    bodies: list[bytes]
    refuse = b""
    answered = 1_000_000  # a request after so many waits for ever
    unanswered = threading.Event()  # two wait

    def data_received(self, data: bytes) -> None:
        head, _, body = data.partition(b"\r\n\r\n")
        if head.startswith(b"POST"):
            type(self).bodies.append(body)
            if (waiting := len(self.bodies) - self.answered) > 0:
                if waiting == 2:
                    self.unanswered.set()
                return
            if self.refuse:
                self._write(self.refuse)
                return
        super().data_received(data)


@pytest.fixture
def stub() -> Iterator[tuple[str, type[Recorder]]]:
    class Fresh(Recorder):
        bodies: list[bytes] = []  # noqa: RUF012  # one list a test
        unanswered = threading.Event()

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(
        loop.create_server(lambda: Fresh(3, 0.0, 0.0), "127.0.0.1", 0)  # the protocol asks for the running loop
    )
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", Fresh
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    server.close()
    loop.close()


def call(*words: str):
    return CliRunner().invoke(cli, list(words), obj=list(words))


def said(done) -> str:
    """Return the output without the terminal's line breaks."""
    return " ".join(done.output.split())


def measure(url: str, tmp_path: Path, name: str, *words: str) -> dict:
    out = tmp_path / f"{name}.json"
    done = call("--url", url, "--out", str(out), "--quiet", *(words or QUICK))
    assert done.exit_code == 0, done.output
    return load_run.read(out)


def test_a_run_leaves_its_result_and_a_report(stub, tmp_path):
    url, recorder = stub
    html = tmp_path / "r.html"
    document = measure(f"{url}/v1", tmp_path, "a", *QUICK, "--html", str(html), "--warmup-turns", "2", "--token-times")
    requests = document["summary"]["requests"]
    sent = document["workload"]["turns"]
    assert (requests["planned"], requests["finished"], requests["failed"]) == (sent - 2, sent - 2, 0)
    assert len(document["requests"]) == len(recorder.bodies) == sent
    assert [row["counts"] for row in document["requests"]] == [False] * 2 + [True] * (sent - 2)
    assert all(len(row["token_s"]) == 3 for row in document["requests"])
    assert document["server"]["model"] == "stub"
    assert document["finished"]
    text = html.read_text()
    assert "<script" not in text
    assert "http://" not in text.replace(url, "")
    assert "<h1>reprise load: a</h1>" in text  # after the result file
    assert text.count('<svg class="plot"') == 7


@pytest.mark.bench
def test_the_command_line_in_the_result_makes_the_same_requests(stub, tmp_path):
    url, recorder = stub
    first = measure(url, tmp_path, "a", *QUICK, "--api-key", "secret", "--loop", "sequential", "--ignore-eos")
    bodies = list(recorder.bodies)
    recorder.bodies.clear()
    assert "secret" not in json.dumps(first)
    again = load_run.read(tmp_path / "a.json")
    assert call(*again["command"][2:]).exit_code == 0
    assert recorder.bodies == bodies
    assert load_run.read(tmp_path / "a.json")["workload"] == first["workload"]
    other = measure(url, tmp_path, "b", *QUICK, "--seed", "4")
    assert other["workload"]["digest"] != first["workload"]["digest"]


@pytest.mark.bench
def test_conversations_that_come_again_are_told(stub, tmp_path):
    url, _ = stub
    talks = [
        {"turns": [{"role": "user", "content": f"how is {who}"}, {"role": "assistant", "content": "fine"}]}
        for who in ("a", "b")
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, talks)))
    words = ["--dialogues", str(tmp_path / "d.jsonl"), "--think", "fixed:0", "--rate", "500"]
    workload = measure(url, tmp_path, "all", *words)["workload"]
    assert (workload["conversations"], workload["repeated"]) == (2, 0)
    done = call("--url", url, "--quiet", "--out", str(tmp_path / "more.json"), *words, "--conversations", "5")
    assert "3 of them repeat others word for word" in said(done)
    assert load_run.read(tmp_path / "more.json")["workload"]["repeated"] == 3
    assert measure(url, tmp_path, "made-up", *QUICK)["workload"]["repeated"] == 0


def test_where_results_cannot_go_is_said_before_anything_is_sent(stub, tmp_path):
    url, recorder = stub
    for words in (["--out", str(tmp_path)], ["--html", str(tmp_path)], ["--out", str(tmp_path / "no" / "r.json")]):
        done = call("--url", url, *QUICK, "--quiet", *words)
        assert done.exit_code == 2
        assert "directory" in done.output
    assert recorder.bodies == []


def test_a_link_is_followed_and_a_pipe_is_written_to(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    load_run.save("a", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "a"
    os.mkfifo(tmp_path / "pipe")
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    read: list[str] = []
    reader.start()
    load_run.check_writable(tmp_path / "pipe")
    load_run.save("b", tmp_path / "pipe")
    reader.join()
    assert read == ["b"]
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "pipe"]


def test_a_password_in_an_address_is_not_kept(stub, tmp_path):
    url, _ = stub
    document = measure(url.replace("http://", "http://user:secret@"), tmp_path, "a", *QUICK)
    assert "secret" not in json.dumps(document)


@pytest.mark.bench
@pytest.mark.parametrize("spoilt", [{"summary": None}, {"by_turn": "x"}, {"by_turn": [{"turn": {}}]}, {"options": []}])
def test_a_result_with_other_contents_is_refused(stub, tmp_path, spoilt):
    url, _ = stub
    document = measure(url, tmp_path, "a", *QUICK)
    (tmp_path / "b.json").write_text(json.dumps(document | spoilt))
    (tmp_path / "c.json").write_text(json.dumps({"format": load_run.FORMAT}))
    for name in ("b", "c"):
        done = call("compare", str(tmp_path / f"{name}.json"), "--html", str(tmp_path / "r.html"))
        assert done.exit_code == 2, done.output
        assert "whole result" in said(done)
    assert call("compare", str(tmp_path / "a.json"), str(tmp_path / "a.json"), "--names", "[/],b").exit_code == 0


def test_keys_and_files_that_are_none_are_refused(stub, tmp_path):
    url, recorder = stub
    whole = gzip.compress(b'{"timestamp": 0, "input_length": 5, "output_length": 1}\n' * 1000)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "latin.jsonl").write_bytes(b"{\xe9}")
    (tmp_path / "nan.jsonl").write_text('{"timestamp": NaN, "input_length": 5, "output_length": 1}')
    (tmp_path / "half.jsonl").write_text('{"timestamp": 0, "input_length": 5.5, "output_length": 1}')
    (tmp_path / "huge.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01,1" + 30 * "0" + ",1")
    (tmp_path / "said.json").write_text('[{"conversations": "hello"}, {"turns": [5]}]')
    for words in (
        ["--trace", "cut.jsonl.gz"], ["--trace", "latin.jsonl"], ["--trace", "nan.jsonl"], ["--trace", "half.jsonl"],
        ["--trace", "huge.csv"], ["--dialogues", "said.json"],
    ):  # fmt: skip
        done = call("--url", url, words[0], str(tmp_path / words[1]))
        assert (done.exit_code, words[1] in done.output.replace("\n", "")) == (2, True), done.output
    assert call("--url", url, *QUICK, "--api-key", "é").exit_code == 2
    assert call("--url", url, *QUICK, "--gpus", "inf").exit_code == 2
    nothing = call("--url", url, "--conversations", "2", "--rate", "0.001", "--duration", "0.01", "--quiet")
    assert (nothing.exit_code, "nothing was due" in said(nothing)) == (2, True)
    assert recorder.bodies == []


@pytest.mark.bench
def test_conversations_that_fit_no_window_are_counted(stub, tmp_path):
    url, recorder = stub
    long = [{"role": "user", "content": "how are you"}, {"role": "assistant", "content": "fine" * 800}]
    lonely = [long[0]]
    short = [long[0], {"role": "assistant", "content": "fine"}]
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"turns": turns}) for turns in (long, short, lonely)))
    words = ["--dialogues", str(tmp_path / "d.jsonl"), "--conversations", "4", "--think", "fixed:0", "--rate", "500"]
    done = call("--url", url, "--quiet", "--out", str(tmp_path / "d.json"), *words, "--max-context", "100")
    assert done.exit_code == 0
    assert "2 of 4 left out" in said(done)
    assert "1 in the file are unusable" in said(done)
    assert "--max-context" in done.output
    workload = load_run.read(tmp_path / "d.json")["workload"]
    assert (workload["conversations"], workload["left_out"], len(recorder.bodies)) == (2, 2, 2)
    assert workload["unusable"] == 1
    assert measure(url, tmp_path, "all", *words)["workload"]["left_out"] == 0


@pytest.mark.bench
def test_dialogues_and_traces(stub, tmp_path):
    url, recorder = stub
    dialogue = {"turns": [{"role": "user", "content": "how are you"}, {"role": "assistant", "content": "fine"}] * 2}
    (tmp_path / "d.jsonl").write_text(json.dumps(dialogue))
    document = measure(url, tmp_path, "d", "--dialogues", str(tmp_path / "d.jsonl"), "--conversations", "2",
                       "--loop", "closed", "--think", "fixed:0", "--system-tokens", "5")  # fmt: skip
    assert document["workload"]["turns"] == 4
    last = json.loads(recorder.bodies[-1])["messages"]
    assert [m["role"] for m in last] == ["system", "user", "assistant", "user"]
    assert (last[1]["content"], last[2]["content"]) == ("how are you", "word word word ")
    recorder.bodies.clear()
    rows = [{"timestamp": 5 * n, "input_length": 600 + n, "output_length": 4, "hash_ids": [0, n + 1]} for n in range(4)]
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    document = measure(url, tmp_path, "t", "--trace", str(tmp_path / "t.jsonl.gz"), "--max-context", "560")
    prompts = [json.loads(body)["messages"][0]["content"].split() for body in recorder.bodies]
    assert [len(prompt) for prompt in prompts] == [560 - 16 - 4] * 4
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 4


def test_what_fails_is_counted_by_kind(stub, tmp_path):
    url, recorder = stub
    recorder.refuse = b"HTTP/1.1 400 Bad\r\ncontent-length: 23\r\n\r\ncontext_length_exceeded"
    done = call("--url", url, "--out", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"), "--quiet", *QUICK)
    assert done.exit_code == 1
    assert "--max-context" in done.output
    requests = load_run.read(tmp_path / "a.json")["summary"]["requests"]
    assert requests["errors"] == {"context_length": 6}
    assert (requests["sent"], requests["finished"]) == (6, 0)
    assert "nothing to draw" in (tmp_path / "a.html").read_text()


@pytest.mark.bench
def test_runs_side_by_side(stub, tmp_path):
    url, _ = stub
    measure(url, tmp_path, "a")
    measure(url, tmp_path, "b")
    measure(url, tmp_path, "c", *QUICK, "--seed", "4")
    html = tmp_path / "r.html"
    done = call("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--names", "x<y,z", "--html", str(html))
    assert done.exit_code == 0
    assert "TTFT p95" in done.output
    assert "workload" not in done.output
    assert "x&lt;y p50" in html.read_text()
    assert "x<y" not in html.read_text()
    done = call("compare", *(str(tmp_path / f"{name}.json") for name in "ac"))
    assert "did not send the same workload" in done.output
    assert "seed" in done.output
    assert "By turn" in call("compare", str(tmp_path / "a.json")).output


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--url", "ftp://x"], "not an http"),
        (["--url", "http://127.0.0.1:9"], "no server at"),
        (["--loop", "open-ended"], "--loop is one of"),
        (["--think", "soon"], "lognormal"),
        (["--dialogues", "none.json"], "none.json"),
        (["--dialogues", "a", "--trace", "b"], "not both"),
        (["--trace", "a", "--loop", "closed"], "leave --loop open"),
        (["--over-4k", "0.9"], "shares"),
        (["--body", "[]"], "not a JSON object"),
        (["--max-context", "9"], "nothing of this workload fits"),
        (["--out", "/no/such/place/a.json"], "no directory"),
        (["compare", "none.json"], "none.json"),
    ],
)
def test_what_cannot_be_run_is_said_beforehand(stub, words, why):
    url, recorder = stub
    done = call(*([] if "--url" in words or "compare" in words else ["--url", url]), *words)
    assert done.exit_code == 2
    assert why in " ".join(done.output.split())
    assert recorder.bodies == []


@pytest.mark.bench
def test_nothing_is_written_over_what_is_read(stub, tmp_path):
    url, recorder = stub
    dialogue = {"turns": [{"role": "user", "content": "how are you"}, {"role": "assistant", "content": "fine"}]}
    path, link = tmp_path / "d.jsonl", tmp_path / "link.json"
    path.write_text(json.dumps(dialogue))
    link.symlink_to(path)
    before = path.read_text()
    for out in (path, link):
        done = call("--url", url, "--dialogues", str(path), "--out", str(out))
        assert (done.exit_code, "another name" in said(done)) == (2, True)
    done = call("--url", url, "--out", str(tmp_path / "new"), "--html", str(tmp_path / "new"), *QUICK)
    assert (done.exit_code, "another name" in said(done)) == (2, True)
    assert (path.read_text(), recorder.bodies) == (before, [])
    measure(url, tmp_path, "a", *QUICK)
    done = call("compare", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.json"))
    assert done.exit_code == 2
    load_run.read(tmp_path / "a.json")
    assert call("--url", url, "--quiet", "--out", os.devnull, "--html", os.devnull, *QUICK).exit_code == 0


def test_a_file_that_is_no_result_is_refused(tmp_path):
    path = tmp_path / "x.json"
    for text in ("{", "[]", '{"format": "other"}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"not JSON|not a result"):
            load_run.read(path)


def test_ctrl_c_leaves_what_there_is(stub, tmp_path, monkeypatch):
    url, _ = stub

    class Stopping(load_run.asyncio.Runner):
        def run(self, coroutine, **rest):
            super().run(coroutine, **rest)
            raise KeyboardInterrupt

    monkeypatch.setattr(load_run.asyncio, "Runner", Stopping)
    done = call("--url", url, "--out", str(tmp_path / "a.json"), "--quiet", *QUICK)
    assert done.exit_code == 1
    document = load_run.read(tmp_path / "a.json")
    assert not document["finished"]
    assert document["summary"]["requests"]["finished"] > 0
    assert "stopped before its end" in html_page.render(["a"], [document])


def test_what_ctrl_c_interrupts_has_neither_finished_nor_failed(stub, tmp_path, monkeypatch):
    url, recorder = stub
    recorder.answered = 4

    class Stopping(load_run.asyncio.Runner):
        def run(self, coroutine, **rest):
            async def stopped() -> None:
                running = asyncio.ensure_future(coroutine)
                await asyncio.to_thread(recorder.unanswered.wait, 20)
                running.cancel()
                await asyncio.wait([running])

            super().run(stopped(), **rest)
            raise KeyboardInterrupt

    monkeypatch.setattr(load_run.asyncio, "Runner", Stopping)
    done = call("--url", url, "--out", str(tmp_path / "a.json"), "--quiet", *QUICK)
    assert done.exit_code == 1
    document = load_run.read(tmp_path / "a.json")
    requests = document["summary"]["requests"]
    assert (requests["finished"], requests["failed"], requests["errors"]) == (4, 0, {})
    assert requests["interrupted"] >= 2
    assert requests["sent"] == 4 + requests["interrupted"] == len(document["requests"])
    assert sum(row["requests"] for row in document["by_turn"]) == 4
    assert sum(row["failed"] + row["finished"] for row in document["timeline"]) == 4
    assert f"{requests['interrupted']} interrupted" in said(done)


def keys(value: object) -> set[str]:
    if isinstance(value, dict):
        return {*value, *(key for inner in value.values() for key in keys(inner))}
    if isinstance(value, list):
        return {key for inner in value for key in keys(inner)}
    return set()


def test_every_field_of_the_result_is_documented(stub, tmp_path):
    url, _ = stub
    text = DOCS.read_text(encoding="utf-8")
    document = measure(url, tmp_path, "a", *QUICK, "--token-times")
    found = keys(document) - {"errors"}
    assert {name for name in found if f"`{name}`" not in text} == set()
