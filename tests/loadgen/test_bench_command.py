"""Tests `reprise bench` against stubs, from the command line to its table."""

import asyncio
import json
import random
import threading
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from benchmarks.harness.stub_server import Kind, Stub
from reprise.loadgen.bench_command import cli
from reprise.loadgen.measure.bench_run import own_prompts, read_prompts


class Recorder(Stub):
    """A stub that keeps what it was sent, and answers a turn whose history it knows sooner."""

    bodies: list[dict]
    deleted: list[str]
    keys: set[str]
    is_reprise = True
    delete_status = 204
    status = b""

    def data_received(self, data: bytes) -> None:
        head, _, body = data.partition(b"\r\n\r\n")
        method, path, *_ = head.split(b" ")
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"authorization:"):
                self.keys.add(line.split(b" ", 1)[1].decode())
        if method == b"POST":
            said = json.loads(body)
            self.bodies.append(said)
            if self.status:
                self._write(self.status)
                return
            self._delay_s = 0.03 if self.is_anew(said) else 0.0
            super().data_received(data)
        elif method == b"DELETE":
            self.deleted.append(path.decode())
            self._write(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % self.delete_status)
        elif path == b"/version" and self.is_reprise:
            self._json({"version": "1", "wire_version": 1})
        else:
            super().data_received(data)

    def is_anew(self, said: dict) -> bool:
        """Whether an earlier request did not begin like this one."""
        before = [body["messages"][0] for body in self.bodies[:-1]]
        return said["messages"][0] not in before

    def _event(self, event: dict, kind: Kind) -> None:
        if event.get("usage") and self.is_reprise:
            kept = {"hbm_tokens": 10, "dram_tokens": 20, "disk_tokens": 60, "redis_tokens": 0, "computed_tokens": 10}
            anew = {"computed_tokens": 100}
            event = {**event, "x_cache": anew if self.is_anew(self.bodies[-1]) else kept}
        super()._event(event, kind)

    def _json(self, said: dict) -> None:
        data = json.dumps(said).encode()
        self._write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data))


@pytest.fixture
def stub() -> Iterator[tuple[str, type[Recorder]]]:
    class Fresh(Recorder):
        bodies: list[dict] = []  # noqa: RUF012  # one list a test
        deleted: list[str] = []  # noqa: RUF012
        keys: set[str] = set()  # noqa: RUF012

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(loop.create_server(lambda: Fresh(3, 0.0, 0.0), "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", Fresh
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    server.close()
    loop.close()


def call(*words: str, columns: int = 200):
    return CliRunner().invoke(cli, list(words), env={"COLUMNS": str(columns)})


def row_of(output: str, label: str) -> list[str]:
    (line,) = (line for line in output.splitlines() if line.strip().startswith(label) and "%" in line)
    return [cell.strip() for cell in line.strip().split("  ") if cell.strip()]


def test_it_says_what_a_kept_history_gives_and_tidies_up(stub):
    url, recorder = stub
    done = call(f"{url}/v1", "--seconds", "20", "--requests", "30", "--api-key", "secret")
    assert done.exit_code == 0, done.output
    assert len(recorder.bodies) <= 30
    label, count, _, _, spread, *shares = row_of(done.output, "history kept")
    assert (int(count) >= 5, " - " in spread, shares) == (True, True, ["10%", "20%", "60%", "10%"]), label
    assert row_of(done.output, "history anew")[-1] == "100%"
    assert "times as fast" in done.output
    sessions = {body["session_id"] for body in recorder.bodies}
    assert {path.removeprefix("/v1/sessions/") for path in recorder.deleted} == sessions
    assert recorder.keys == {"Bearer secret"}
    assert "secret" not in done.output


def test_a_narrow_terminal_has_room_for_its_table(stub):
    done = call(stub[0], "--seconds", "20", "--requests", "30", columns=80)
    assert row_of(done.output, "history kept")[-1] == "10%"
    assert "…" not in done.output


def test_two_medians_of_few_turns_are_not_compared(stub):
    done = call(stub[0], "--seconds", "20", "--requests", "6")
    assert done.exit_code == 0
    assert "Too few turns for a comparison" in done.output
    assert row_of(done.output, "history kept")[4] == "-"


def test_a_turn_anew_has_the_same_messages_but_for_its_first_word(stub):
    url, recorder = stub
    assert call(url, "--requests", "12", "--seconds", "20").exit_code == 0
    kept = [body["messages"] for body in recorder.bodies if len(body["messages"]) > 1]
    firsts = [body["messages"][0]["content"] for body in recorder.bodies if len(body["messages"]) == 1]
    anew = [messages for messages in kept if messages[0]["content"] not in firsts]
    assert anew
    for messages in anew:
        word, _, rest = messages[0]["content"].partition(" ")
        assert rest in firsts
        assert len(word) == 12
        assert [{**messages[0], "content": rest}, *messages[1:]] in kept


def test_against_another_server_it_says_what_cannot_be_known(stub):
    url, recorder = stub
    recorder.is_reprise = False
    done = call(url, "--requests", "9", "--seconds", "20")
    assert done.exit_code == 0, done.output
    assert "is not Reprise" in done.output
    assert "DRAM" not in done.output
    assert recorder.deleted == []
    assert not any("session_id" in body for body in recorder.bodies)


def test_prompts_of_ones_own(stub, tmp_path):
    url, recorder = stub
    file = tmp_path / "prompts"
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two?"}]
    file.write_text(f'One?\n\n{json.dumps(talk)}\n{{"messages": {json.dumps(talk[1:])}}}\n"Three?"\n')
    assert call(url, "--prompts", str(file), "--requests", "30", "--seconds", "20").exit_code == 0
    firsts = [body["messages"] for body in recorder.bodies[:4]]
    assert firsts == [[{"role": "user", "content": "One?"}], talk, talk[1:], [{"role": "user", "content": "Three?"}]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no prompt"),
        ("[1, 2", "line 1: not JSON"),
        ("One?\n[]", "line 2: neither a text nor a list"),
        ('[{"role": "user"}]', "a role and a content"),
        ('[{"role": "assistant", "content": "x"}]', "not a user's"),
        ('{"prompt": "x"}', "neither a text nor a list"),
        ("x\n" * 1001, "more than 1000 prompts"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused(tmp_path, text, problem):
    file = tmp_path / "prompts"
    file.write_text(text)
    done = call("http://127.0.0.1:1", "--prompts", str(file))
    assert (done.exit_code, problem in " ".join(done.output.split())) == (2, True), done.output


def test_it_ends_in_time_and_says_what_failed(stub):
    url, recorder = stub
    recorder.status = b"HTTP/1.1 503 X\r\ncontent-length: 2\r\n\r\n{}"
    done = call(url, "--requests", "9", "--seconds", "2")
    assert done.exit_code == 2
    assert "requests failed" in done.output


def test_a_server_that_never_answers_does_not_hold_it_up(stub):
    url, recorder = stub
    recorder.status = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    done = call(url, "--seconds", "1")
    assert (done.exit_code, "no answer began in time" in done.output) == (2, True)


def test_sessions_that_stay_are_named(stub):
    url, recorder = stub
    recorder.delete_status = 503
    done = call(url, "--requests", "6", "--seconds", "20")
    assert "sessions could not be deleted: bench-" in done.output


def test_without_a_server_it_says_so():
    done = call("http://127.0.0.1:1", "--seconds", "1")
    assert (done.exit_code, "no server at" in done.output) == (2, True)


def test_own_prompts_begin_differently():

    prompts = own_prompts(8, 50, random.Random(1))
    assert len({prompt[0]["content"][:20] for prompt in prompts}) == 8
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)


def test_prompts_are_read_as_they_stand(tmp_path):
    file = tmp_path / "prompts"
    file.write_text("  Why is the sky blue?  \n", encoding="utf-8")
    assert read_prompts(file) == [[{"role": "user", "content": "Why is the sky blue?"}]]
