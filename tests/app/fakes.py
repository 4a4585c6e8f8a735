"""A scripted engine, a tokenizer small enough to train here, and a server that uses them."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from reprise.app.main import create_app
from reprise.app.settings.settings import Settings
from reprise.engine.messages import (
    Adopt,
    ModelInfo,
    Output,
    Progress,
    SessionInfo,
    SessionReply,
    SessionRequest,
    Stats,
    Submit,
    Timings,
    TokenLogprob,
    TokensBySource,
    progress_output,
)
from reprise.engine.process.client import EngineFailed, EngineLost, EngineUnavailable

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["The quick brown fox jumps over the lazy dog.", "Hello there, how are you today?", "STOP here. Ünïcödé 🎉"]
WINDOW = 256


# One that shows thoughts, and can be told not to open one.
THINKING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.reasoning_content %}<think>\n"
    "{{ message.reasoning_content }}\n</think>\n\n{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def write_tokenizer(directory: Path, *, template: str = TEMPLATE) -> Path:
    """A byte-level BPE with ChatML, or another template, as a model directory has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def model_info(directory: Path, **changes: Any) -> ModelInfo:
    fields: dict[str, Any] = {
        "name": "test-model",
        "path": str(directory),
        "architecture": "llama",
        "parameters": 1000,
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "torch",
        "max_context": WINDOW,
        "vocab_size": 300,
        "eos_token_ids": (2,),
        "logit_error": 2e-6,
        "logit_tolerance": 1e-3,
        "exact": True,
        "exactness": "the same bits for 1 or 300 rows",
        "decouplable": True,
        "rope_layers": 2,
        "layers": 2,
        "kv_bytes_per_token": 512,
        "hbm_bytes_per_token": changes.get("kv_bytes_per_token", 512),
        "hbm_tokens": 4096,
        "block_size": 32,
        "page_size": 32,
        "fingerprint": "0123456789abcdef0123456789abcdef",
        "warnings": (),
    }
    return ModelInfo(**{**fields, **changes})


STATS = Stats(
    running=0,
    waiting=0,
    sessions=1,
    leases=0,
    hbm_pages_total=128,
    hbm_pages_free=120,
    hbm_pages_cached=8,
    steps=10,
    step_seconds=0.5,
    prompt_tokens={"hbm": 32, "computed": 9},
    generated_tokens=7,
    drafted_tokens={"context accepted": 5, "prediction rejected": 2},
    miss_tokens={"new": 9},
    evicted_blocks=0,
    preemptions=0,
    aborted=0,
    tier_bytes={"dram": 1000, "disk": 2000},
    tier_capacity={"dram": 4000, "disk": 8000},
    moved_bytes={"dram_to_hbm": 300, "disk_to_hbm": 400},
    moved_seconds={"dram_to_hbm": 0.25, "disk_to_hbm": 0.5},
    load_wait_seconds=0.25,
    load_seconds=1.0,
    evictions={"dram": 5},
    refused={"disk": 6},
    load_failures={"checksum": 2},
    write_failures={"disk": 4},
    truncated_tokens=64,
    in_flight=3,
    verified_loads=11,
    verify_mismatches=1,
)


@dataclass
class Script:
    """The script that the engine plays with the next requests."""

    answer: str = "Hello there, how are you today?"
    step_s: float = 0.0  # between two tokens
    start_s: float = 0.0  # before the first
    may_start: asyncio.Event | None = None  # the first waits for it too
    tokens_per_output: int = 1
    die_after: int | None = None  # tokens, then EngineLost
    refuse: str | None = None  # error_code of the first output
    refuse_after: int = 0  # tokens before that
    unavailable: bool = False
    token_ids: list[int] | None = None  # instead of `answer`, without an end-of-text
    report: dict[str, Any] | None = None  # fields of the first report
    predictions: tuple[int, int] = (0, 0)  # tokens of them accepted and rejected, told with the last output
    progress: Sequence[Progress] = ()  # told before the first token to those who want it
    last_report: dict[str, Any] | None = None  # another one with the last output, as after a cut in the middle


class FakeStream:
    def __init__(self, engine: "FakeEngine", request: Submit) -> None:
        self.request = request
        self.open = {n for n in range(request.num_choices) if not request.resume or request.resume[n] is not None}
        self.queue: asyncio.Queue[Output | None] = asyncio.Queue()
        self.lost = False
        self._engine = engine
        self.tasks = [asyncio.create_task(engine.run(self, choice)) for choice in sorted(self.open)]

    def __aiter__(self) -> "FakeStream":
        return self

    async def __anext__(self) -> Output:
        while True:
            if not self.open and self.queue.empty():
                raise StopAsyncIteration
            output = await self.queue.get()
            if output is None:
                if self.lost:
                    raise EngineLost("died")
                continue
            return output

    def put(self, output: Output) -> None:
        if output.choice in self.open:
            if output.finish_reason is not None:
                self.open.discard(output.choice)
            self.queue.put_nowait(output)

    def end(self, choice: int) -> None:
        self.open.discard(choice)
        self.queue.put_nowait(None)

    def lose(self) -> None:
        self.lost = True
        self.queue.put_nowait(None)

    async def aclose(self) -> None:
        if self.open:
            self._engine.aborted.append(self.request.request_id)
        self.open.clear()
        self.queue.put_nowait(None)
        for task in self.tasks:
            task.cancel()


@dataclass
class FakeEngine:
    """The interface of `reprise.engine.process.client.EngineClient`."""

    directory: Path
    script: Script = field(default_factory=Script)
    state: str = "stopped"
    failure: str | None = None
    restarts: int = 0
    submitted: list[Submit] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    finished: list[tuple[str, int, int]] = field(default_factory=list)
    load_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)  # what its model is besides `model_info`
    questions: list[SessionRequest] = field(default_factory=list)
    adopted: list[Adopt] = field(default_factory=list)
    kept: dict[tuple[str, str], SessionInfo] = field(default_factory=dict)
    session_error: str | Exception | None = None  # an error code, or what is raised

    def __post_init__(self) -> None:
        self.model: ModelInfo | None = None
        self.stats: Stats | None = STATS
        self.streams: list[FakeStream] = []
        self._loaded = asyncio.Event()
        self.tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))

    async def start(self) -> None:
        self.state = "loading"
        if self.failure is None:
            self._loading = asyncio.get_running_loop().call_later(self.load_s, self.loaded)

    def loaded(self) -> None:
        self.model, self.state = model_info(self.directory, **self.facts), "ready"
        self._loaded.set()

    async def stop(self) -> None:
        self.state = "stopped"

    async def wait_ready(self) -> None:
        if self.failure is not None:
            self.state = "failed"
            raise EngineFailed(self.failure)
        await self._loaded.wait()

    async def submit(self, request: Submit) -> FakeStream:
        if self.script.unavailable or self.state != "ready":
            raise EngineUnavailable("restarting", retry_after_s=3.0)
        self.submitted.append(request)
        stream = FakeStream(self, request)
        self.streams.append(stream)
        return stream

    async def sessions(self, request: SessionRequest | Adopt, *, timeout_s: float) -> SessionReply:
        """Keeps `kept`, (tenant, session id) -> session, the way the engine does; `session_error` overrides it."""
        if isinstance(request, Adopt):
            self.adopted.append(request)
            return SessionReply(request_id=request.request_id, sessions=[])
        self.questions.append(request)
        if self.session_error is not None:
            if isinstance(self.session_error, Exception):
                raise self.session_error
            return SessionReply(request_id=request.request_id, sessions=[], error_code=self.session_error)
        mine = {name: info for (tenant, name), info in sorted(self.kept.items()) if tenant == request.tenant}
        if request.action == "list":
            behind = [info for name, info in mine.items() if name > request.after]
            page = behind[: request.limit]
            return SessionReply(request_id=request.request_id, sessions=page, more=len(behind) > len(page))
        if request.action == "list_all":
            tenant, _, name = request.after.partition("/")
            rest = [info for key, info in sorted(self.kept.items()) if key > (tenant, name)]
            page = rest[: request.limit]
            return SessionReply(request_id=request.request_id, sessions=page, more=len(rest) > len(page))
        if request.action == "recent":
            newest = sorted(mine.values(), key=lambda info: info.last_used_s, reverse=True)
            return SessionReply(request_id=request.request_id, sessions=newest[: request.limit])
        if request.session_id not in mine:
            return SessionReply(request_id=request.request_id, sessions=[], error_code="not_found")
        key = request.tenant, request.session_id
        if request.action == "delete":
            del self.kept[key]
            return SessionReply(request_id=request.request_id, sessions=[])
        if request.pinned is not None:
            expires_s = None if request.pinned else 2000.0
            self.kept[key] = msgspec.structs.replace(self.kept[key], pinned=request.pinned, expires_s=expires_s)
        if request.ttl_s is not None:
            self.kept[key] = msgspec.structs.replace(self.kept[key], expires_s=1000.0 + request.ttl_s)
        return SessionReply(request_id=request.request_id, sessions=[self.kept[key]])

    def finish(self, request_id: str, choice: int, keep_tokens: int) -> None:
        self.finished.append((request_id, choice, keep_tokens))
        for stream in self.streams:
            if stream.request.request_id == request_id:
                stream.end(choice)

    def finish_all(self) -> None:
        for stream in self.streams:
            for choice in list(stream.open):
                stream.put(self.output(stream.request, choice, [], finish_reason="length"))

    def output(self, request: Submit, choice: int, token_ids: list[int], **changes: Any) -> Output:
        asked = request.sampling.logprobs
        top = [(5 + n, -2.0 - n) for n in range(asked or 0)]
        fields: dict[str, Any] = {
            "request_id": request.request_id,
            "choice": choice,
            "token_ids": token_ids,
            "logprobs": None if asked is None else [TokenLogprob(logprob=-0.5, top=top) for _ in token_ids],
            "finish_reason": None,
            "report": None,
            "timings": None,
            "error": None,
            "error_code": None,
        }
        return Output(**{**fields, **changes})

    async def run(self, stream: FakeStream, choice: int) -> None:
        script, request = self.script, stream.request
        prompt = len(request.token_ids)
        cached = prompt // 2 if choice == 0 else prompt - 1
        first_report = TokensBySource(
            prompt_tokens=prompt,
            history_tokens=cached,
            hbm_tokens=cached,
            dram_tokens=0,
            disk_tokens=0,
            truncated_tokens=0,
            shifted_tokens=0,
            miss_reasons={"new": prompt - cached},
        )
        report: TokensBySource | None = msgspec.structs.replace(first_report, **(script.report or {}))
        last_report = msgspec.structs.replace(first_report, **script.last_report) if script.last_report else None
        ids = [*self.tokenizer.encode(script.answer).ids, 2] if script.token_ids is None else script.token_ids
        limited = ids[: request.sampling.max_tokens]
        said = len(request.resume[choice] or ()) if request.resume else 0
        reason = "stop" if limited == ids and ids[-1] == 2 else "length"
        await asyncio.sleep(script.start_s)
        if script.may_start is not None:
            await script.may_start.wait()
        for progress in script.progress if request.progress else ():
            stream.put(progress_output(request.request_id, choice, progress))
            await asyncio.sleep(script.step_s)
        for start in range(said, len(limited), script.tokens_per_output):
            if script.die_after is not None and start >= script.die_after:
                stream.lose()
                return
            if script.refuse is not None and start >= script.refuse_after:
                changes = {"finish_reason": "error", "error": "secret detail", "error_code": script.refuse}
                stream.put(self.output(request, choice, [], **changes))
                return
            chunk = limited[start : start + script.tokens_per_output]
            last = start + len(chunk) == len(limited)
            decode_ms = 30.0 if last else 0.0
            timings = (
                Timings(queue_ms=1.0, load_ms=0.0, prefill_ms=2.0, decode_ms=decode_ms, saved_ms=250.0)
                if report or last
                else None
            )
            finish_reason = reason if last else None
            report = last_report or report if last else report
            accepted, rejected = script.predictions if finish_reason is not None else (0, 0)
            output = self.output(
                request,
                choice,
                chunk,
                report=report,
                timings=timings,
                finish_reason=finish_reason,
                accepted_predictions=accepted,
                rejected_predictions=rejected,
            )
            if start == 0 and choice == 0 and (top := request.prompt_logprobs) is not None:
                likely = [(5 + n, -2.0 - n) for n in range(top)]
                known = [TokenLogprob(logprob=-0.25, top=likely) for _ in request.token_ids[1:]]
                output = msgspec.structs.replace(output, prompt_logprobs=known)
            stream.put(output)
            report = None
            await asyncio.sleep(script.step_s)


def session_info(session_id: str, **changes: Any) -> SessionInfo:
    info = SessionInfo(
        session_id=session_id,
        cache_salt="",
        tokens=100,
        truncated_tokens=32,
        blocks={"hbm": 2, "disk": 4},
        bytes={"hbm": 2048, "disk": 4096},
        last_used_s=1000.0,
        expires_s=2000.0,
        pinned=False,
        running=False,
    )
    return msgspec.structs.replace(info, **changes)


def make_settings(state_dir: Path, **sections: dict[str, Any]) -> Settings:
    cache = {"disk_dir": state_dir, **sections.pop("cache", {})}
    return Settings.model_validate({"cache": cache, **sections})


@dataclass
class Running:
    """An app with its lifespan on."""

    app: FastAPI
    engine: FakeEngine
    base_url: str
    http: httpx.AsyncClient

    async def chat(self, content: str = "Hello", **fields: Any) -> httpx.Response:
        body = {"model": "test-model", "messages": [{"role": "user", "content": content}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)


@contextlib.asynccontextmanager
async def in_process(engine: FakeEngine, settings: Settings, *, wait: bool = True) -> AsyncIterator[Running]:
    """Through ASGITransport: no sockets, whole answers only."""
    app = create_app(settings, engine=engine)
    async with app.router.lifespan_context(app):
        if wait:
            await app.state.readiness.wait_loaded()
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield Running(app, engine, "http://test", http)


@contextlib.asynccontextmanager
async def on_loopback(engine: FakeEngine, settings: Settings) -> AsyncIterator[Running]:
    """A real uvicorn on a free port, in this event loop."""
    app = create_app(settings, engine=engine)
    server = uvicorn.Server(uvicorn.Config(app, port=0, http="h11", log_config=None, access_log=False))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started, timeout_s=10)
    await app.state.readiness.wait_loaded()
    port = server.servers[0].sockets[0].getsockname()[1]
    base_url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=base_url, timeout=10) as http:
            yield Running(app, engine, base_url, http)
    finally:
        server.should_exit = server.force_exit = True
        await task


async def until(condition: Callable[[], object], timeout_s: float = 1.0) -> float:
    """Return the seconds it took; fail past `timeout_s`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s
        await asyncio.sleep(0.005)
    return time.monotonic() - start


def events(text: str) -> list[Any]:
    """The data of a stream of server-sent events, without [DONE] and comments."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
