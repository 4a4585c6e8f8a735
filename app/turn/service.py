"""Brings a turn to the engine: admits, prepares and submits it."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from reprise.app.conversations.text_thread import TextThread
from reprise.app.errors import ApiError, engine_unavailable, invalid, prompt_too_long, with_target
from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.schemas.completions import CompletionRequest
from reprise.app.schemas.fields import GenerationRequest
from reprise.app.settings.settings import Settings
from reprise.app.tenancy.places import Places
from reprise.app.tenancy.quotas import Quotas
from reprise.app.tenancy.weights import service_tier, ttft_target_ms
from reprise.app.turn.deadline import Deadline
from reprise.app.turn.generation import Admitted, Generation
from reprise.app.turn.observer import TurnObserver
from reprise.app.turn.ports import EnginePort, TurnHooks
from reprise.app.turn.prepare import (
    MAX_TOKEN_CHARS,
    Caller,
    Prepare,
    Prepared,
    Prompt,
    narrowed,
    prepare_chat,
    prepare_text,
    session_id_of,
)
from reprise.app.turn.readiness import Readiness
from reprise.app.turn.sampling import sampling
from reprise.app.turn.sessions import SessionCommands
from reprise.app.turn.stopped_streams import sent_back, wait_closed
from reprise.app.turn.token_limits import TokenLimits
from reprise.engine.messages import ModelInfo
from reprise.engine.process.client import EngineUnavailable


class TurnService:
    """A service that submits turns. One per app, on its event loop. Every method raises ApiError for a request that is
    refused."""

    def __init__(
        self,
        *,
        settings: Settings,
        engine: EnginePort,
        readiness: Readiness,
        sessions: SessionCommands,
        transcripts: TextThread,
        places: Places,
        quotas: Quotas,
        observer: TurnObserver,
    ) -> None:
        self.places = places
        self.generations: set[Generation] = set()  # under way
        self._settings = settings
        self._engine = engine
        self._readiness = readiness
        self._sessions = sessions
        self._transcripts = transcripts
        self._quotas = quotas
        self._observer = observer

    async def generate(self, request: ChatCompletionRequest, caller: Caller) -> Generation:
        """Submit a chat. Returns its generation, which must be iterated to its end or closed."""
        request = self._settled(narrowed(request, caller))
        return await self._begin(request, caller, partial(self._prepare_chat, request, caller.tenant))

    async def complete(self, request: CompletionRequest, prompt: Prompt, caller: Caller) -> Generation:
        """Submit one prompt of a text completion. Returns its generation, as `generate` does."""
        request = narrowed(request, caller)

        async def prepare(model: ModelInfo, session_id: str | None) -> Prepared:
            return prepare_text(request, prompt, session_id)

        return await self._begin(request, caller, prepare)

    async def chat_tokens(self, request: ChatCompletionRequest, caller: Caller) -> list[int]:
        """Return the token ids of the prompt that `generate` would submit. Occupies one of the tenant's places until it
        returns."""
        request = narrowed(request, caller)
        self._readiness.require()
        model = self._readiness.find_model(request.model)
        ticket = self.places.enter(caller.tenant, 1, is_counted=caller.hooks.is_counted)
        try:
            session_id = session_id_of(request, caller.session_header)
            return (await self._prepare_chat(request, caller.tenant, model, session_id)).token_ids
        finally:
            ticket.leave()

    async def text_tokens(self, texts: list[str], caller: Caller, *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of texts. Occupies one of the tenant's places until it returns."""
        model, tokenizer = self._readiness.require()
        longest = max(self._settings.limits.prompt_tokens, model.max_context)
        if sum(map(len, texts)) > longest * MAX_TOKEN_CHARS or any(tokenizer.exceeds(text, longest) for text in texts):
            raise prompt_too_long(longest, None, param="prompt")
        ticket = self.places.enter(caller.tenant, 1, is_counted=caller.hooks.is_counted)
        try:
            return await asyncio.to_thread(tokenizer.encode_prompts, texts, add_special_tokens=add_special_tokens)
        finally:
            ticket.leave()

    async def hand_over(self) -> None:
        """Stop the generations that another server of the fleet can continue, so that their answers go on there."""
        for generation in [generation for generation in self.generations if generation.hooks.can_move]:
            await generation.hand_over()

    async def close(self) -> None:
        """End all generations, however far their answers have come."""
        for generation in list(self.generations):
            await generation.aclose()

    async def _begin(self, request: GenerationRequest, caller: Caller, prepare: Prepare) -> Generation:
        """Admit, prepare and submit a request. prepare: called with the model and a session id, makes the prompt. The
        generation frees the request's places at its end; after an error this method frees them."""
        self._readiness.require()
        model = self._readiness.find_model(request.model)
        self._check(request, model, caller.tenant)
        session_id = caller.hooks.admit(session_id_of(request, caller.session_header), model)
        admitted = await self._admit(request, caller, model)
        try:
            try:
                async with admitted.deadline.limit():
                    prepared = await self._prepare(caller.hooks, partial(prepare, model), session_id, request.salt)
            except TimeoutError:
                raise admitted.deadline.error(retry_after_s=admitted.ticket.retry_after_s) from None
            return await self._submit(prepared, admitted)
        except BaseException as error:
            if isinstance(error, ApiError):
                error.headers = admitted.ticket.headers | error.headers
            admitted.ticket.leave()
            raise

    def _check(self, request: GenerationRequest, model: ModelInfo, tenant: str) -> None:
        """Raise ApiError for errors that a request's schema cannot find."""
        if (request.n or 1) > (places := self.places.places_of(tenant)):
            raise invalid(f"Invalid 'n': this server takes at most {places}.", "n")
        for name, ids in (("logit_bias", request.logit_bias), ("stop_token_ids", request.stop_token_ids)):
            if ids and max(ids) >= model.vocab_size:
                raise invalid(f"Invalid '{name}': the vocabulary has {model.vocab_size} tokens.", name)
        if request.kv_quality == "exact" and model.hbm_divergence is not None:
            raise invalid(
                "Invalid 'kv_quality': this server's KV is int8 in HBM ('cache.hbm_dtype'), which is not exact.",
                "kv_quality",
            )

    async def _admit(self, request: GenerationRequest, caller: Caller, model: ModelInfo) -> Admitted:
        deadline = Deadline.of(
            arrived_s=caller.arrived_s,
            field_s=request.timeout,
            header=caller.timeout_header,
            limit_s=self._settings.limits.request_timeout_s,
        )
        tier, weight = service_tier(request)
        if caller.hooks.is_new:
            await self._quotas.check(caller.tenant)
        target_ms = ttft_target_ms(request, weight=weight, of_key=caller.ttft_ms)
        try:
            ticket = self.places.enter(caller.tenant, request.n or 1, is_counted=caller.hooks.is_counted)
        except ApiError as error:
            raise with_target(error, target_ms) from None
        return Admitted(caller.tenant, caller.arrived_s, model, ticket, deadline, tier, weight, target_ms, caller.hooks)

    async def _prepare(
        self, hooks: TurnHooks, prepare: Callable[[str | None], Awaitable[Prepared]], session_id: str | None, salt: str
    ) -> Prepared:
        """Prepare a request after this server has become its session's home in the fleet. That may fetch transcripts
        from other servers. If the session is found only by preparing, and transcripts were fetched, the request is
        prepared again."""
        if session_id is not None:
            await hooks.claim(session_id, salt)
            return await prepare(session_id)
        prepared = await prepare(None)
        found = prepared.prompt.session_id
        if prepared.prompt.spliced_tokens and await hooks.claim(found, salt):
            prepared = await prepare(found)
        return prepared

    async def _prepare_chat(
        self, request: ChatCompletionRequest, tenant: str, model: ModelInfo, session_id: str | None
    ) -> Prepared:
        _, tokenizer = self._readiness.require()
        prepare = partial(
            prepare_chat,
            request,
            tokenizer=tokenizer,
            transcripts=self._transcripts,
            model=model,
            tenant=tenant,
            session_id=session_id,
            limits=TokenLimits.of(model, self._settings.limits, truncates=self._truncates(request)),
            cache=self._settings.cache,
        )
        under_way = list(self.generations)
        prepared = await prepare()
        if under_way and (stopped := sent_back(under_way, request, prepared.prompt)):
            await wait_closed(stopped)
            prepared = await prepare()
        return prepared

    def _truncates(self, request: GenerationRequest) -> bool:
        return (request.truncation or self._settings.cache.truncation) != "disabled"

    def _settled(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        """Return the request with its truncation, if it gives none, where the setting depends on its tools."""
        if request.truncation is None and self._settings.cache.truncation == "chats" and request.has_tools:
            return request.model_copy(update={"truncation": "disabled"})
        return request

    async def _submit(self, prepared: Prepared, admitted: Admitted) -> Generation:
        _, tokenizer = self._readiness.require()  # a drain may have begun meanwhile
        request, prompt_tokens = prepared.request, len(prepared.token_ids)
        truncates = self._truncates(request) and prepared.prompt_logprobs is None
        limits = TokenLimits.of(admitted.model, self._settings.limits, truncates=truncates)
        if prompt_tokens >= limits.prompt:
            raise limits.too_long(prompt_tokens, param=prepared.param)
        max_tokens = limits.answer(request.answer_tokens, prompt_tokens=prompt_tokens)
        submit = admitted.hooks.resume(
            prepared.as_submit(
                tenant=admitted.tenant,
                sampling=sampling(request, self._readiness.sampling_defaults, max_tokens=max_tokens),
                weight=admitted.weight,
                target_s=admitted.target_left_s,
            )
        )
        try:
            outputs = await self._engine.submit(submit)
        except EngineUnavailable as error:
            raise engine_unavailable(error, str(self._engine.state)) from None
        if admitted.hooks.is_new:
            self._spend(admitted, prompt_tokens)
        generation = Generation(
            admitted=admitted,
            prepared=prepared,
            submit=submit,
            choices=prepared.answers(tokenizer),
            engine=self._engine,
            outputs=outputs,
            observer=self._observer,
            on_close=partial(self._closed, admitted, request.keep_s),
        )
        self.generations.add(generation)
        self._observer.opened(generation)
        return generation

    def _spend(self, admitted: Admitted, tokens: int) -> None:
        self.places.spend(admitted.tenant, tokens)
        admitted.hooks.spend(tokens)

    def _closed(self, admitted: Admitted, keep_s: float | None, generation: Generation) -> None:
        tenant, choices = generation.tenant, generation.choices
        self.generations.discard(generation)
        self._spend(admitted, max(0, sum(len(choice.token_ids) for choice in choices) - generation.paid_tokens))
        self._quotas.changed(tenant)
        if keep_s is not None and keep_s != self._settings.cache.ttl_s and any(choice.token_ids for choice in choices):
            self._sessions.keep(generation.session_id, tenant=tenant, ttl_s=keep_s)
