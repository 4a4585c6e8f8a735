"""What the routes share: the engine's state, the tokenizer, the transcripts, the answers under way."""

import asyncio
import contextlib
import logging
import secrets
import time
from enum import StrEnum
from functools import partial
from pathlib import Path

import msgspec

from app.conversations.text_thread import TextThread
from app.conversations.transcript_store import PreparedPrompt
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
from app.schemas.chat import ChatCompletionRequest
from app.schemas.completions import CompletionRequest
from app.schemas.fields import GenerationRequest
from app.settings.settings import Settings
from app.tenancy.keyring import Keyring
from app.tenancy.places import Places, Ticket
from app.tenancy.quotas import Quotas
from app.tenancy.weights import service_tier
from app.text.tokenizer import ChatTokenizer, TokenizerError
from app.turn.answer import Answer
from app.turn.deadline import Deadline
from app.turn.generation import Generation
from app.turn.observer import TurnObserver
from app.turn.ports import EnginePort
from app.turn.prepare import (
    MAX_TOKEN_CHARS,
    AnyRequest,
    Caller,
    Prepare,
    Prepared,
    Prompt,
    prepare_chat,
    prepare_text,
    session_id_of,
)
from app.turn.sampling import OPENAI, SamplingDefaults, read_defaults, sampling
from engine.messages import ModelInfo, SessionReply, SessionRequest, Submit
from engine.process.client import EngineFailed, EngineLost, EngineTimeout, EngineUnavailable

SWEEP_S = 60.0
CLOSING_S = 1.0  # for a stream to be noticed as hung up by who sends back what came of it
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

    def __init__(
        self,
        *,
        settings: Settings,
        engine: EnginePort,
        transcripts: TextThread,
        keyring: Keyring,
        observer: TurnObserver,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.model: ModelInfo | None = None  # once loaded it stays, also while the engine restarts
        self.sampling_defaults: SamplingDefaults = OPENAI  # the model's own, once it is loaded
        self.loaded_s: int = 0  # unix time
        self.failure: str | None = None
        self.draining = False
        self.generations: set[Generation] = set()
        self.places = Places(
            places=settings.places,
            tenant_places=settings.tenant_places,
            running=settings.scheduler.max_seqs,
            limits=keyring.limits,
        )
        self.quotas = Quotas(limits=keyring.limits, ask=self.ask_sessions, delete=self.delete_session)
        self._transcripts = transcripts
        self._observer = observer
        self._tokenizer: ChatTokenizer | None = None
        self._ready = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._keeping: set[asyncio.Task[None]] = set()  # sessions whose time to live is being set

    async def start(self) -> None:
        """Returns at once; the model loads in the background."""
        await self.engine.start()
        self._tasks = [asyncio.create_task(self._load()), asyncio.create_task(self._sweep())]

    async def stop(self) -> None:
        tasks = [*self._tasks, *self._keeping]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for generation in list(self.generations):
            await generation.aclose()
        await self.quotas.close()
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

    async def generate(self, request: ChatCompletionRequest, caller: Caller) -> Generation:
        """Admit, tokenize, submit, and hand over what must be iterated to its end and closed. Raises ApiError."""
        return await self._admitted(request, caller, self._prepare_chat)

    async def chat_tokens(self, request: ChatCompletionRequest, caller: Caller) -> list[int]:
        """The prompt that `generate` would submit; takes a place for as long. Raises ApiError."""
        self.require_ready()
        model = self.find_model(request.model)
        ticket = self.places.enter(caller.tenant, 1)
        try:
            prepared = await self._prepare_chat(request, caller, model, session_id_of(request, caller.session_header))
            return prepared.token_ids
        finally:
            ticket.leave()

    async def text_tokens(self, texts: list[str], caller: Caller, *, add_special_tokens: bool) -> list[list[int]]:
        """The ids of texts. Raises ApiError."""
        model, tokenizer = self.require_ready()
        longest = max(self.settings.limits.prompt_tokens, model.max_context)
        if sum(map(len, texts)) > longest * MAX_TOKEN_CHARS or any(tokenizer.exceeds(text, longest) for text in texts):
            raise prompt_too_long(longest, None, param="prompt")
        ticket = self.places.enter(caller.tenant, 1)
        try:
            return await asyncio.to_thread(tokenizer.encode_prompts, texts, add_special_tokens=add_special_tokens)
        finally:
            ticket.leave()

    async def complete(self, request: CompletionRequest, prompt: Prompt, caller: Caller) -> Generation:
        """The same for one prompt of a text completion."""

        async def prepare(
            request: CompletionRequest, caller: Caller, model: ModelInfo, session_id: str | None
        ) -> Prepared:
            return prepare_text(request, prompt, session_id)

        return await self._admitted(request, caller, prepare)

    async def _admitted(self, request: AnyRequest, caller: Caller, prepare: Prepare[AnyRequest]) -> Generation:
        self.require_ready()
        model = self.find_model(request.model)
        num_choices = request.n or 1
        self._check_limits(request, model, num_choices, self.places.places_of(caller.tenant))
        session_id = session_id_of(request, caller.session_header)
        deadline = Deadline.of(
            arrived_s=caller.arrived_s,
            field_s=request.timeout,
            header=caller.timeout_header,
            limit_s=self.settings.limits.request_timeout_s,
        )
        await self.quotas.check(caller.tenant)
        ticket = self.places.enter(caller.tenant, num_choices)
        try:
            try:
                async with deadline.limit():
                    prepared = await prepare(request, caller, model, session_id)
            except TimeoutError:
                raise deadline.error(retry_after_s=ticket.retry_after_s) from None
            return await self._start_turn(request, caller, model, prepared, ticket, deadline)
        except ApiError as error:
            error.headers = ticket.headers | error.headers
            ticket.leave()
            raise
        except BaseException:
            ticket.leave()
            raise

    async def _prepare_chat(
        self, request: ChatCompletionRequest, caller: Caller, model: ModelInfo, session_id: str | None
    ) -> Prepared:
        _, tokenizer = self.require_ready()
        truncates = self._truncates(request)
        longest = self.settings.limits.prompt_tokens if truncates else model.max_context
        prepare = partial(
            prepare_chat,
            request,
            tokenizer=tokenizer,
            transcripts=self._transcripts,
            model=model,
            tenant=caller.tenant,
            session_id=session_id,
            longest=longest,
            truncates=truncates,
            client_shift=self.settings.cache.client_shift,
            keep_first_tokens=self.settings.cache.keep_first_tokens,
        )
        under_way = list(self.generations)
        prepared = await prepare()
        if ending := _sent_back(under_way, request, prepared.prompt):
            closing = [asyncio.create_task(generation.closed.wait()) for generation in ending]
            try:
                await asyncio.wait(closing, timeout=CLOSING_S)
            finally:
                for task in closing:
                    task.cancel()
            prepared = await prepare()
        return prepared

    def _truncates(self, request: GenerationRequest) -> bool:
        return (request.truncation or self.settings.cache.truncation) == "auto"

    async def _start_turn(
        self,
        request: GenerationRequest,
        caller: Caller,
        model: ModelInfo,
        prepared: Prepared,
        ticket: Ticket,
        deadline: Deadline,
    ) -> Generation:
        """To the engine; the generation gives the ticket back."""
        _, tokenizer = self.require_ready()  # a drain may have begun meanwhile
        truncates = self._truncates(request) and prepared.prompt_logprobs is None
        longest = self.settings.limits.prompt_tokens if truncates else model.max_context
        if len(prepared.token_ids) >= longest:
            too_long = prompt_too_long if truncates else context_length_exceeded
            raise too_long(longest, len(prepared.token_ids), param=prepared.param)
        tier, weight = service_tier(request, max_weight=self.settings.server.max_weight)
        request_id = f"{prepared.id_prefix}-{secrets.token_hex(12)}"
        submit = Submit(
            request_id=request_id,
            session_id=prepared.prompt.session_id,
            tenant=caller.tenant,
            cache_salt=request.cache_salt or "",
            token_ids=prepared.token_ids,
            num_choices=request.n or 1,
            sampling=sampling(
                request,
                self.sampling_defaults,
                max_tokens=answer_limit(
                    request.answer_tokens,
                    room=model.max_context - len(prepared.token_ids),
                    window=model.max_context,
                    beyond_window=self.settings.limits.answer_tokens if truncates else 0,
                ),
            ),
            truncation="disabled" if prepared.prompt_logprobs is not None else request.truncation or "",
            keep_first_tokens=min(prepared.keep_first_tokens, len(prepared.token_ids)),
            message_starts=prepared.message_starts,
            important=prepared.important,
            shift=prepared.shift,
            weight=weight,
            grammar=prepared.grammar,
            prompt_logprobs=prepared.prompt_logprobs,
        )
        try:
            outputs = await self.engine.submit(submit)
        except EngineUnavailable as error:
            raise engine_unavailable(error, str(self.engine.state)) from None
        self.places.spend(caller.tenant, len(prepared.token_ids))
        generation = Generation(
            request_id=request_id,
            tenant=caller.tenant,
            model=model,
            engine=self.engine,
            outputs=outputs,
            prompt=prepared.prompt,
            token_ids=prepared.token_ids,
            sampling=submit.sampling,
            choices=[
                Answer(
                    index=index,
                    tokenizer=tokenizer,
                    stops=tuple(request.stop or ()),
                    min_tokens=request.min_tokens or 0,
                    parser=prepared.parser(),
                    shows_stop=bool(request.include_stop_str_in_output),
                    skip_special_tokens=request.skip_special_tokens is not False,
                )
                for index in range(request.n or 1)
            ],
            record=prepared.record,
            arrived_s=caller.arrived_s,
            deadline=deadline,
            ticket=ticket,
            service_tier=tier,
            grammar_param=prepared.grammar_param,
            observer=self._observer,
            on_close=partial(self._closed, keep_s=request.keep_s),
        )
        self.generations.add(generation)
        return generation

    def _closed(self, generation: Generation, *, keep_s: float | None) -> None:
        tenant = generation.tenant
        self.generations.discard(generation)
        self.places.spend(tenant, sum(len(choice.token_ids) for choice in generation.choices))
        self.quotas.changed(tenant)
        if keep_s is not None and keep_s != self.settings.cache.ttl_s and any(c.token_ids for c in generation.choices):
            task = asyncio.create_task(self._keep(generation.session_id, tenant, keep_s))
            self._keeping.add(task)
            task.add_done_callback(self._keeping.discard)

    async def _keep(self, session_id: str, tenant: str, keep_s: float) -> None:
        """As long as its client asked for. What does not come to that is a hint that was not taken."""
        request_id = f"sessions-{secrets.token_hex(12)}"
        with contextlib.suppress(ApiError):
            await self.patch_session(
                SessionRequest(
                    request_id=request_id, tenant=tenant, action="patch", session_id=session_id, ttl_s=keep_s
                )
            )

    async def ask_sessions(self, request: SessionRequest) -> SessionReply:
        """Raises ApiError."""
        self.require_ready()
        try:
            reply = await self.engine.sessions(request, timeout_s=self.settings.limits.sessions_timeout_s)
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

    def _check_limits(self, request: GenerationRequest, model: ModelInfo, num_choices: int, places: int) -> None:
        if num_choices > places:
            raise invalid(f"Invalid 'n': this server takes at most {places}.", "n")
        for name, ids in (("logit_bias", request.logit_bias), ("stop_token_ids", request.stop_token_ids)):
            if ids and max(ids) >= model.vocab_size:
                raise invalid(f"Invalid '{name}': the vocabulary has {model.vocab_size} tokens.", name)

    async def _load(self) -> None:
        try:
            await self.engine.wait_ready()
            model = self.engine.model
            assert model is not None
            directory = Path(model.path)
            self._tokenizer = await asyncio.to_thread(ChatTokenizer.load, directory)
            self.sampling_defaults, problems = await asyncio.to_thread(read_defaults, directory)
            for problem in problems:
                log.warning("%s", problem)
            self.model = msgspec.structs.replace(model, warnings=(*model.warnings, *problems))
            self.loaded_s = int(time.time())
        except (EngineFailed, TokenizerError) as error:
            self.failure = str(error)  # `wait_loaded` tells
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


def _sent_back(under_way: list[Generation], request: ChatCompletionRequest, prompt: PreparedPrompt) -> list[Generation]:
    """Of answers that were under way, those whose beginning the request has in its history: their client has hung up,
    and their tokens were not recorded when the prompt was prepared."""
    if not prompt.answered:
        return []
    said = next(message.content for message in reversed(request.messages) if message.role == "assistant")
    return [
        generation
        for generation in under_way
        if said and generation.prompt.chain == prompt.answered and generation.may_have_said(said)
    ]
