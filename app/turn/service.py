"""Brings a turn to the engine: admits, prepares and submits it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from reprise.app.conversations.text_thread import TextThread
from reprise.app.errors import ApiError, engine_unavailable, invalid, prompt_too_long
from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.schemas.completions import CompletionRequest
from reprise.app.schemas.fields import GenerationRequest
from reprise.app.settings.settings import Settings
from reprise.app.tenancy.places import Places
from reprise.app.tenancy.quotas import Quotas
from reprise.app.tenancy.weights import service_tier
from reprise.app.turn.deadline import Deadline
from reprise.app.turn.generation import Admitted, Generation
from reprise.app.turn.observer import TurnObserver
from reprise.app.turn.ports import EnginePort, FleetPort
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
from reprise.app.turn.resume import ResumedTurn, cannot_resume, digest_of
from reprise.app.turn.sampling import sampling
from reprise.app.turn.sessions import SessionCommands
from reprise.app.turn.stopped_streams import sent_back, wait_closed
from reprise.app.turn.token_limits import TokenLimits
from reprise.engine.messages import ModelInfo, Submit
from reprise.engine.process.client import EngineUnavailable
from reprise.fleet.keys import SessionName

log = logging.getLogger(__name__)


class TurnService:
    """Submits turns. One per app, on its event loop. Every method raises ApiError for what is refused."""

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
        fleet: FleetPort | None = None,
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
        self._fleet = fleet

    async def generate(self, request: ChatCompletionRequest, caller: Caller) -> Generation:
        """Submit a chat. Returns its generation, which must be iterated to its end or closed."""
        request = narrowed(request, caller)
        return await self._begin(request, caller, partial(self._prepare_chat, request, caller.tenant))

    async def complete(self, request: CompletionRequest, prompt: Prompt, caller: Caller) -> Generation:
        """Submit one prompt of a text completion. Returns its generation, as `generate` does."""
        request = narrowed(request, caller)

        async def prepare(model: ModelInfo, session_id: str | None) -> Prepared:
            return prepare_text(request, prompt, session_id)

        return await self._begin(request, caller, prepare)

    async def chat_tokens(self, request: ChatCompletionRequest, caller: Caller) -> list[int]:
        """Return the prompt that `generate` would submit. Takes a place meanwhile."""
        request = narrowed(request, caller)
        self._readiness.require()
        model = self._readiness.find_model(request.model)
        ticket = self.places.enter(caller.tenant, 1, is_counted=caller.is_counted)
        try:
            session_id = session_id_of(request, caller.session_header)
            return (await self._prepare_chat(request, caller.tenant, model, session_id)).token_ids
        finally:
            ticket.leave()

    async def text_tokens(self, texts: list[str], caller: Caller, *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of texts. Takes a place meanwhile."""
        model, tokenizer = self._readiness.require()
        longest = max(self._settings.limits.prompt_tokens, model.max_context)
        if sum(map(len, texts)) > longest * MAX_TOKEN_CHARS or any(tokenizer.exceeds(text, longest) for text in texts):
            raise prompt_too_long(longest, None, param="prompt")
        ticket = self.places.enter(caller.tenant, 1, is_counted=caller.is_counted)
        try:
            return await asyncio.to_thread(tokenizer.encode_prompts, texts, add_special_tokens=add_special_tokens)
        finally:
            ticket.leave()

    async def hand_over(self) -> None:
        """End the generations that a gateway relays, which has another server go on with them."""
        for generation in [generation for generation in self.generations if generation.is_relayed]:
            await generation.hand_over()

    async def close(self) -> None:
        """End all generations where they are."""
        for generation in list(self.generations):
            await generation.aclose()

    async def _begin(self, request: GenerationRequest, caller: Caller, prepare: Prepare) -> Generation:
        """Admit, prepare and submit a request. The generation gives its places back; an error gives them back here."""
        self._readiness.require()
        model = self._readiness.find_model(request.model)
        self._check(request, model, caller.tenant)
        session_id = session_id_of(request, caller.session_header)
        resumed = caller.resumed
        if resumed is not None:
            session_id = resumed.note.session_id
            if resumed.fingerprint != model.fingerprint:
                raise cannot_resume("This answer was begun by another model.")
            if resumed.exact != model.exact:
                raise cannot_resume("This answer was begun by a server with another 'model.exact'.")
        admitted = await self._admit(request, caller, model)
        try:
            try:
                async with admitted.deadline.limit():
                    prepared = await self._prepare(request, caller, partial(prepare, model), session_id)
            except TimeoutError:
                raise admitted.deadline.error(retry_after_s=admitted.ticket.retry_after_s) from None
            return await self._submit(prepared, admitted, caller)
        except BaseException as error:
            if isinstance(error, ApiError):
                error.headers = admitted.ticket.headers | error.headers
            admitted.ticket.leave()
            raise

    def _check(self, request: GenerationRequest, model: ModelInfo, tenant: str) -> None:
        """Refuse what a request's schema cannot know to be wrong."""
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
        tier, weight = service_tier(request, max_weight=self._settings.server.max_weight)
        goes_on = caller.resumed is not None  # it was admitted where it began
        if not goes_on:
            await self._quotas.check(caller.tenant)
        ticket = self.places.enter(caller.tenant, request.n or 1, is_counted=caller.is_counted or goes_on)
        return Admitted(caller.tenant, caller.arrived_s, model, ticket, deadline, tier, weight, caller.relayed)

    async def _prepare(
        self,
        request: GenerationRequest,
        caller: Caller,
        prepare: Callable[[str | None], Awaitable[Prepared]],
        session_id: str | None,
    ) -> Prepared:
        """Prepare a request. In a fleet its session is claimed first, and what other servers have said is brought."""
        if self._fleet is None:
            return await prepare(session_id)
        salt = request.salt
        if session_id is not None:
            await self._fleet.claim(SessionName(caller.tenant, session_id, salt))
            return await prepare(session_id)
        prepared = await prepare(None)
        found = prepared.prompt.session_id
        if prepared.prompt.spliced_tokens and await self._fleet.claim(SessionName(caller.tenant, found, salt)):
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
        if stopped := sent_back(under_way, request, prepared.prompt):
            await wait_closed(stopped)
            prepared = await prepare()
        return prepared

    def _truncates(self, request: GenerationRequest) -> bool:
        return (request.truncation or self._settings.cache.truncation) == "auto"

    async def _submit(self, prepared: Prepared, admitted: Admitted, caller: Caller) -> Generation:
        resumed = caller.resumed
        _, tokenizer = self._readiness.require()  # a drain may have begun meanwhile
        request, prompt_tokens = prepared.request, len(prepared.token_ids)
        truncates = self._truncates(request) and prepared.prompt_logprobs is None
        limits = TokenLimits.of(admitted.model, self._settings.limits, truncates=truncates)
        if prompt_tokens >= limits.prompt:
            raise limits.too_long(prompt_tokens, param=prepared.param)
        max_tokens = limits.answer(request.answer_tokens, prompt_tokens=prompt_tokens)
        submit = prepared.as_submit(
            tenant=admitted.tenant,
            sampling=sampling(request, self._readiness.sampling_defaults, max_tokens=max_tokens),
            weight=admitted.weight,
        )
        resumed_tokens = 0
        if resumed is not None:
            submit = _resume(submit, resumed)
            resumed_tokens = resumed.num_tokens(submit.num_choices)
        try:
            outputs = await self._engine.submit(submit)
        except EngineUnavailable as error:
            raise engine_unavailable(error, str(self._engine.state)) from None
        if resumed is None:
            self._spend(admitted.tenant, prompt_tokens)
        generation = Generation(
            admitted=admitted,
            prepared=prepared,
            submit=submit,
            choices=prepared.answers(tokenizer),
            engine=self._engine,
            outputs=outputs,
            observer=self._observer,
            on_close=partial(self._closed, keep_s=request.keep_s, resumed_tokens=resumed_tokens),
            resumed=resumed,
            in_fleet=None
            if self._fleet is None
            else self._fleet.begin(
                tenant=admitted.tenant, session_id=submit.session_id, salt=submit.cache_salt, model=admitted.model
            ),
            chain=caller.chain,
            keep_s=self._settings.cache.ttl_s if request.keep_s is None else request.keep_s,
        )
        self.generations.add(generation)
        return generation

    def _spend(self, tenant: str, tokens: int) -> None:
        self.places.spend(tenant, tokens)
        if self._fleet is not None:
            self._fleet.spend(tenant, tokens)

    def _closed(self, generation: Generation, *, keep_s: float | None, resumed_tokens: int) -> None:
        """resumed_tokens: those that the tenant has paid for on another server."""
        tenant, choices = generation.tenant, generation.choices
        self.generations.discard(generation)
        self._spend(tenant, max(0, sum(len(choice.token_ids) for choice in choices) - resumed_tokens))
        self._quotas.changed(tenant)
        if keep_s is not None and keep_s != self._settings.cache.ttl_s and any(choice.token_ids for choice in choices):
            self._sessions.keep(generation.session_id, tenant=tenant, ttl_s=keep_s)


def _resume(submit: Submit, resumed: ResumedTurn) -> Submit:
    """Return the message that has the engine go on with what another server has said."""
    said = resumed.said(submit.num_choices)
    if resumed.note.prompt != digest_of(submit.token_ids):
        # The text is the same, so the answer goes on validly, though not as it would have where it began.
        log.warning("the prompt of a resumed answer has other token ids here: its transcript is missing or incomplete")
    return msgspec.structs.replace(
        submit,
        resume=said,
        over=resumed.over(submit.num_choices),
        sampling=msgspec.structs.replace(submit.sampling, seed=resumed.note.seed),
        prompt_logprobs=None,  # a stream shows none
    )
