"""What the routes share: the engine's state, the tokenizer, the transcripts, the answers under way."""

import asyncio
import hashlib
import logging
import secrets
import time
from enum import StrEnum
from functools import partial
from pathlib import Path

from app.admission import Admission, Ticket
from app.deadline import Deadline
from app.errors import (
    ApiError,
    context_length_exceeded,
    engine_lost,
    engine_timeout,
    engine_unavailable,
    invalid,
    model_not_found,
    prompt_too_long,
    session_error,
    unavailable,
)
from app.generation import Engine, Generation
from app.live import Live
from app.metrics import Metrics
from app.schemas import SESSION_ID, ChatCompletionRequest
from app.service_tier import service_tier
from app.settings import Settings
from app.text_thread import TextThread
from app.tokenizer import ChatTokenizer, PromptTooLong, TemplateError, TokenizerError
from app.transcript import PreparedPrompt
from engine.client import EngineFailed, EngineLost, EngineTimeout, EngineUnavailable
from engine.messages import ModelInfo, SamplingParams, SessionReply, SessionRequest, Shift, Submit

SWEEP_S = 60.0
MAX_TOKEN_CHARS = 256  # no vocabulary in use has longer tokens, so text beyond that is too long without tokenizing it
RETRY_S = {"loading": 5.0, "restarting": 5.0, "draining": 30.0}

log = logging.getLogger(__name__)


class Status(StrEnum):
    """What /ready says. Requests are taken in `ready` only."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class Service:
    """One per app. Belongs to one event loop."""

    def __init__(self, *, settings: Settings, engine: Engine, transcripts: TextThread) -> None:
        self.settings = settings
        self.engine = engine
        self.model: ModelInfo | None = None  # once loaded it stays, also while the engine restarts
        self.loaded_s: int = 0  # unix time
        self.failure: str | None = None
        self.draining = False
        self.generations: set[Generation] = set()
        self.admission = Admission(
            places=settings.places, tenant_places=settings.tenant_places, running=settings.scheduler.max_seqs
        )
        self.metrics = Metrics(engine=engine, active=lambda: len(self.generations))
        self.live = Live(engine=engine, places=settings.server.watchers)
        self._transcripts = transcripts
        self._tokenizer: ChatTokenizer | None = None
        self._ready = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns at once; the model loads in the background."""
        await self.engine.start()
        self._tasks = [asyncio.create_task(self._load()), asyncio.create_task(self._sweep())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for generation in list(self.generations):
            await generation.aclose()
        await self.engine.stop()
        await self._transcripts.close()

    async def wait_loaded(self) -> ModelInfo:
        """Raises EngineFailed when the model cannot be served."""
        await self._ready.wait()
        if self.model is None:
            raise EngineFailed(self.failure or "the engine failed")
        return self.model

    @property
    def status(self) -> Status:
        if self.failure is not None:
            return Status.FAILED
        if self.draining:
            return Status.DRAINING
        if self.engine.state == "ready" and self._tokenizer is None:
            return Status.LOADING
        return Status(str(self.engine.state))

    def require_ready(self) -> tuple[ModelInfo, ChatTokenizer]:
        """Raises ApiError 503 with Retry-After unless requests are taken."""
        status = self.status
        if status is not Status.READY or self.model is None or self._tokenizer is None:
            message = f"The server takes no requests right now: it is {status}."
            raise unavailable(message, code=str(status), retry_after_s=RETRY_S.get(status, 60.0))
        return self.model, self._tokenizer

    def find_model(self, name: str) -> ModelInfo:
        """By its name or one of the aliases. Raises ApiError 404, or 503 while nothing is loaded."""
        if self.model is None:
            self.require_ready()
        assert self.model is not None
        if name != self.model.name and name not in self.settings.model.aliases:
            raise model_not_found(name)
        return self.model

    async def generate(
        self,
        request: ChatCompletionRequest,
        *,
        tenant: str,
        session_header: str | None,
        timeout_header: str | None,
        arrived_s: float,
    ) -> Generation:
        """Admit, tokenize, submit, and hand over what must be iterated to its end and closed. Raises ApiError."""
        self.require_ready()
        model = self.find_model(request.model)
        num_choices = request.n or 1
        self._check_limits(request, model, num_choices)
        session_id = _session_id(request, session_header)
        deadline = Deadline.of(
            arrived_s=arrived_s,
            field_s=request.timeout,
            header=timeout_header,
            limit_s=self.settings.server.request_timeout_s,
        )
        ticket = self.admission.enter(tenant, num_choices)
        try:
            return await self._start(request, model, tenant, session_id, ticket, deadline, arrived_s)
        except ApiError as error:
            error.headers = ticket.headers | error.headers
            ticket.leave()
            raise
        except BaseException:
            ticket.leave()
            raise

    async def _start(
        self,
        request: ChatCompletionRequest,
        model: ModelInfo,
        tenant: str,
        session_id: str | None,
        ticket: Ticket,
        deadline: Deadline,
        arrived_s: float,
    ) -> Generation:
        """What `generate` does for an admitted request, whose generation gives the ticket back."""
        _, tokenizer = self.require_ready()
        num_choices = request.n or 1
        truncates = (request.truncation or self.settings.cache.truncation) == "auto"
        longest = self.settings.server.max_prompt_tokens if truncates else model.max_context
        too_long = prompt_too_long if truncates else context_length_exceeded
        if sum(len(message.content) for message in request.messages) > longest * MAX_TOKEN_CHARS:
            raise too_long(longest, None)
        if not tokenizer.has_chat_template:
            raise invalid("This model has no chat template.", code="no_chat_template", param="model")
        try:
            async with deadline.limit():
                prompt = await self._transcripts.prepare(
                    tokenizer=tokenizer,
                    # Whoever has another salt must not even learn that somebody had the same conversation.
                    tenant=f"{tenant}/{request.cache_salt}" if request.cache_salt else tenant,
                    model=model.fingerprint,
                    messages=[message.as_rendered() for message in request.messages],
                    tools=None,
                    template_args=request.chat_template_kwargs or {},
                    session_id=session_id,
                    now=time.time(),
                    client_shift=self.settings.cache.client_shift
                    if request.client_shift is None
                    else request.client_shift,
                    max_tokens=longest - 1,
                    max_newest_tokens=min(longest, model.max_context) - 1,
                )
        except PromptTooLong as error:
            alone = error.max_tokens < longest - 1  # where history makes room, the newest message has to fit
            raise (context_length_exceeded(model.max_context, None) if alone else too_long(longest, None)) from None
        except TemplateError as error:
            raise invalid(str(error)[:500], "messages") from None
        except TimeoutError:
            raise deadline.error(retry_after_s=ticket.retry_after_s) from None
        self.require_ready()  # a drain may have begun meanwhile
        if len(prompt.token_ids) >= longest:
            raise too_long(longest, len(prompt.token_ids))
        cut = prompt.shift
        tier, weight = service_tier(request, max_weight=self.settings.server.max_weight)
        request_id = f"chatcmpl-{secrets.token_hex(12)}"
        submit = Submit(
            request_id=request_id,
            session_id=prompt.session_id,
            tenant=tenant,
            cache_salt=request.cache_salt or "",
            token_ids=prompt.token_ids,
            num_choices=num_choices,
            sampling=sampling(
                request,
                max_tokens=answer_limit(
                    request.answer_tokens,
                    room=model.max_context - len(prompt.token_ids),
                    window=model.max_context,
                    beyond_window=self.settings.server.max_answer_tokens if truncates else 0,
                ),
            ),
            truncation=request.truncation or "",
            keep_first_tokens=self._keep_first_tokens(request, prompt),
            message_starts=tuple(dict.fromkeys(prompt.starts[: len(request.messages)])),  # one may have no token
            important=important_ranges(request, prompt.starts),
            shift=None if cut is None else Shift(stream=cut.stream, keep=cut.keep, resume=cut.resume),
            weight=weight,
        )
        try:
            outputs = await self.engine.submit(submit)
        except EngineUnavailable as error:
            raise engine_unavailable(error, str(self.engine.state)) from None
        generation = Generation(
            request_id=request_id,
            model=model,
            engine=self.engine,
            outputs=outputs,
            tokenizer=tokenizer,
            transcripts=self._transcripts,
            metrics=self.metrics,
            prompt=prompt,
            num_choices=num_choices,
            stops=tuple(request.stop or ()),
            min_tokens=request.min_tokens or 0,
            arrived_s=arrived_s,
            deadline=deadline,
            ticket=ticket,
            service_tier=tier,
            on_first_token=partial(self.live.first_token, tenant),
            on_close=self.generations.discard,
        )
        self.generations.add(generation)
        return generation

    async def ask_sessions(self, request: SessionRequest) -> SessionReply:
        """Raises ApiError."""
        self.require_ready()
        try:
            reply = await self.engine.sessions(request, timeout_s=self.settings.server.sessions_timeout_s)
        except EngineUnavailable as error:
            raise engine_unavailable(error, str(self.engine.state)) from None
        except EngineTimeout:
            raise engine_timeout() from None
        except EngineLost:
            raise engine_lost() from None
        if reply.error_code is not None:
            raise session_error(reply.error_code, request.session_id or request.after)
        return reply

    async def patch_session(self, request: SessionRequest) -> SessionReply:
        """The KV, and the transcript without which it would not be recognised. Raises ApiError."""
        reply = await self.ask_sessions(request)
        for info in reply.sessions:
            ttl_s = None if info.expires_s is None else info.expires_s - info.last_used_s
            self._transcripts.keep(info.session_id, tenant=request.tenant, ttl_s=ttl_s)
        return reply

    async def delete_session(self, request: SessionRequest) -> None:
        """The KV, then the transcript, which may be there without KV. Raises ApiError."""
        missing: ApiError | None = None
        try:
            await self.ask_sessions(request)
        except ApiError as error:
            if error.status != 404:
                raise
            missing = error
        if await self._transcripts.forget(request.session_id, tenant=request.tenant) == 0 and missing is not None:
            raise missing

    def _keep_first_tokens(self, request: ChatCompletionRequest, prompt: PreparedPrompt) -> int:
        """Leading tokens that a truncation keeps: as asked, as set, or the system prompt."""
        wanted = (
            self.settings.cache.keep_first_tokens if request.keep_first_tokens is None else request.keep_first_tokens
        )
        if wanted < 0:
            others = (n for n, message in enumerate(request.messages) if message.role not in ("system", "developer"))
            first = next(others, len(request.messages))
            wanted = prompt.starts[first] if 0 < first < len(prompt.starts) else 0
        return min(wanted, len(prompt.token_ids))

    def _check_limits(self, request: ChatCompletionRequest, model: ModelInfo, num_choices: int) -> None:
        if num_choices > self.settings.tenant_places:
            raise invalid(f"Invalid 'n': this server takes at most {self.settings.tenant_places}.", "n")
        for name, ids in (("logit_bias", request.logit_bias), ("stop_token_ids", request.stop_token_ids)):
            if ids and max(ids) >= model.vocab_size:
                raise invalid(f"Invalid '{name}': the vocabulary has {model.vocab_size} tokens.", name)

    async def _load(self) -> None:
        try:
            await self.engine.wait_ready()
            model = self.engine.model
            assert model is not None
            self._tokenizer = await asyncio.to_thread(ChatTokenizer.load, Path(model.path))
            self.model, self.loaded_s = model, int(time.time())
        except (EngineFailed, TokenizerError) as error:
            self.failure = str(error)
            log.error("the model cannot be served: %s", error)
        except Exception:
            self.failure = "the model could not be set up; the log has the reason"
            log.exception("setting up the model failed")
        finally:
            self._ready.set()

    async def _sweep(self) -> None:
        """Transcripts nobody came back to leave with the sessions' time to live."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._transcripts.sweep(time.time())


def answer_limit(asked: int | None, *, room: int, window: int, beyond_window: int) -> int:
    """The longest answer, in tokens, where `room` is left in the window.

    `beyond_window` is 0 where a full window ends the answer; otherwise history makes room, an answer may be as long as
    asked up to that bound, and one of no given length has at least the room that a truncation leaves for it.
    """
    if not beyond_window:
        return min(asked or room, room)
    return max(room, window // 8, 1) if asked is None else min(asked, max(room, beyond_window))


def important_ranges(request: ChatCompletionRequest, starts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Token ranges of the messages that are marked so; `starts` has one more entry than there are messages."""
    marked = (
        n for n, message in enumerate(request.messages) if message.x_cache is not None and message.x_cache.important
    )
    return tuple((starts[n], starts[n + 1]) for n in marked if n + 1 < len(starts) and starts[n] < starts[n + 1])


def sampling(request: ChatCompletionRequest, *, max_tokens: int) -> SamplingParams:
    """Unset fields take OpenAI's defaults."""

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    seed = secrets.randbits(64) if request.seed is None else request.seed & (1 << 64) - 1
    top_logprobs = request.top_logprobs or 0
    return SamplingParams(
        temperature=given(request.temperature, 1.0),
        top_p=max(given(request.top_p, 1.0), 1e-6),  # 0 asks for the likeliest token alone
        top_k=max(request.top_k or 0, 0),
        min_p=given(request.min_p, 0.0),
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        repetition_penalty=given(request.repetition_penalty, 1.0),
        logit_bias=request.logit_bias or {},
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min(request.min_tokens or 0, max_tokens),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=request.ignore_eos or False,
        logprobs=top_logprobs if request.logprobs else None,
    )


def _session_id(request: ChatCompletionRequest, header: str | None) -> str | None:
    """What the client calls its conversation. It stays inside the tenant, so it names nobody else's."""
    if request.session_id is not None:
        return request.session_id
    if header is not None:
        if not SESSION_ID.fullmatch(header):
            raise invalid("Invalid 'X-Session-ID': 1 to 128 letters, digits, '.', '_', ':' or '-'.", "X-Session-ID")
        return header
    key = request.prompt_cache_key
    if key is None or SESSION_ID.fullmatch(key):
        return key
    return f"key_{hashlib.sha256(key.encode()).hexdigest()[:32]}"  # free text; the id goes into a header
