"""Creates, stores, runs in the background and finds responses."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from reprise.app.api.responses.answers import Event, ResponseBuilder
from reprise.app.api.responses.as_chat import (
    Item,
    chat_request,
    item_id,
    renamed,
    response_id_of,
    response_of,
    with_ids,
)
from reprise.app.api.thought_seal import ThoughtSeal
from reprise.app.conversations.redis_store import RedisStore
from reprise.app.conversations.response_store import MAX_CHAIN, NotStored, ResponseStore, TooLong
from reprise.app.conversations.unappended import StoredItems
from reprise.app.conversations.unstored import StoredResponses
from reprise.app.errors import ApiError, invalid
from reprise.app.http.event_stream import PING, event
from reprise.app.schemas.past.parts import Losses
from reprise.app.schemas.responses import Item as InputItem
from reprise.app.schemas.responses import ReasoningItem, ResponseRequest
from reprise.app.turn.answer import Delta
from reprise.app.turn.generation import Generation
from reprise.app.turn.ports import ServerHooks
from reprise.app.turn.prepare import Caller
from reprise.app.turn.service import TurnService

log = logging.getLogger(__name__)

Store = ResponseStore | RedisStore
SWEEP_S = 60.0  # between two deletions of expired entries
_UNFINISHED = ("queued", "in_progress")


class ResponseTurn(AsyncIterator[Delta]):
    """One response in progress. It is both an iterator over the generation's deltas and the encoder that turns these
    into the events of its stream. The response is stored before its last event is sent, so that a client that reads
    this event can continue from the response."""

    ping = PING

    def __init__(
        self,
        responses: "Responses",
        request: ResponseRequest,
        tenant: str,
        items: list[Item],
        generation: Generation,
    ) -> None:
        self.generation = generation
        response_id = response_id_of(generation.request_id)
        if request.background:
            response_id = responses.hooks.background_id(response_id)
        # This request's items, without the history.
        self.items = with_ids(items, lambda kind, place: item_id(response_id, kind, place, is_input=True))
        if request.store is not False:
            generation.response_ids.append(response_id)
        self.builder = ResponseBuilder(request, generation, response_id=response_id, seal=responses.seal)
        self.request = request
        self.tenant = tenant
        self._responses = responses
        self._last: list[Event] = []

    async def finish(self) -> dict[str, Any]:
        """Generate the response to its end and return its body. Raises ApiError."""
        async with aclosing(self):
            async for delta in self:
                self.builder.take(delta)
        return self.builder.body()

    @property
    def generations(self) -> Sequence[Generation]:
        return (self.generation,)

    async def wait_first(self, timeout_s: float) -> None:
        try:
            await self.generation.wait_first(timeout_s)
        except ApiError as error:
            raise renamed(error) from None

    async def __anext__(self) -> Delta:
        try:
            return await anext(self.generation)
        except ApiError as error:
            raise renamed(error) from None
        except StopAsyncIteration:
            self._last = self.builder.end(self.generation.choices[0].finish_reason)
            await self._responses.remember(self)
            raise

    async def aclose(self) -> None:
        await self.generation.aclose()

    def opening(self) -> bytes:
        return framed(self.builder.begin())

    def delta(self, delta: Delta) -> bytes:
        return framed(self.builder.take(delta))

    def closing(self) -> bytes:
        return framed(self._last)

    def failed(self, error: ApiError) -> bytes:
        return framed(self.builder.fail(error))


class Responses:
    """A service for /v1/responses. One per app; to be used on its event loop."""

    def __init__(
        self,
        service: TurnService,
        store: Store,
        hooks: ServerHooks,
        seal: ThoughtSeal,
        *,
        ttl_s: float,
        max_referred_bytes: int,
    ) -> None:
        """Set up. seal: makes and opens sealed thoughts, which clients can keep and send back. ttl_s: seconds after
        which an unused response expires. max_referred_bytes: the most bytes of stored items that the `item_reference`
        items of one request may add to it."""
        self.store = store
        self.records = StoredResponses(store, ttl_s=ttl_s)
        self.items = StoredItems(store)
        self.hooks = hooks
        self.seal = seal
        self._service = service
        self._max_referred_bytes = max_referred_bytes
        self._sweep_s = 0.0
        # Responses in the background, by (tenant, id).
        self._running: dict[tuple[str, str], tuple[ResponseTurn, asyncio.Task[None]]] = {}

    async def begin(self, request: ResponseRequest, caller: Caller, losses: Losses) -> ResponseTurn:
        """Submit a request to the engine and return its response in progress. losses: takes the names of parts that
        cannot be read. Raises ApiError."""
        history = await self._history(request, caller.tenant)
        items = await self.stored(caller.tenant, request.input or [], history, losses)
        chat = chat_request(request, [*history, *items])
        if request.conversation is not None and chat.session_id is None and caller.session_header is None:
            chat = chat.model_copy(update={"session_id": request.conversation.id})
        try:
            generation = await self._service.generate(chat, caller)
        except ApiError as error:
            raise renamed(error) from None
        return ResponseTurn(self, request, caller.tenant, items, generation)

    async def tokens(self, request: ResponseRequest, caller: Caller, losses: Losses) -> int:
        """Count the tokens of the prompt that `begin` would submit. losses: takes the names of parts that cannot be
        read. Raises ApiError."""
        history = await self._history(request, caller.tenant)
        items = await self.stored(caller.tenant, request.input or [], history, losses)
        chat = chat_request(request, [*history, *items])
        return len(await self._service.chat_tokens(chat, caller))

    async def stored(
        self, tenant: str, items: Sequence[InputItem], history: Sequence[Item], losses: Losses
    ) -> list[Item]:
        """Return a request's items in the form in which they are stored. Each reference is replaced by the item that it
        names. Reasoning that comes back only sealed (`encrypted_content`, see `ThoughtSeal`) is replaced by its text;
        if this server cannot open the seal, `losses` gets the name of that field, and a summary is kept if there is
        one. Only items that references name have ids. history: items that references may name, in addition to those of
        stored responses. Raises ApiError: 404 for a reference to no such item, 400 for references to more bytes than a
        request may hold."""
        known = {item["id"]: item for item in history}
        looked: set[tuple[str, bool]] = set()
        found: list[Item] = []
        sizes: dict[str, int] = {}
        num_bytes = 0
        for item in items:
            one = item.as_stored()
            if isinstance(item, ReasoningItem) and item.encrypted_content and not one["content"]:
                one |= self._opened(item.encrypted_content, losses)
            if one["type"] != "item_reference":
                found.append(one)
                continue
            place = response_of(one["id"])
            if one["id"] not in known and place is not None and place not in looked:
                looked.add(place)
                known |= {other["id"]: other for other in await self._items_of(tenant, *place)}
            if one["id"] not in known:
                message = f"Item with id '{one['id'][:200]}' not found."
                raise ApiError(404, message, code="item_not_found", param="input")
            if one["id"] not in sizes:
                sizes[one["id"]] = len(msgspec.json.encode(known[one["id"]]))
            num_bytes += sizes[one["id"]]
            if num_bytes > self._max_referred_bytes:
                most = f"{self._max_referred_bytes} bytes (limits.body_bytes)"
                raise invalid(f"The items that the input refers to are larger than {most} in all.", "input")
            found.append(known[one["id"]])
        return found

    def _opened(self, sealed: str, losses: Losses) -> Item:
        """Return the fields of an item that hold a sealed thought; none if the seal is not ours."""
        thought = self.seal.open(sealed)
        if thought is None:
            losses.add("input", "encrypted_content")
        return {"content": [{"type": "reasoning_text", "text": thought}], "summary": []} if thought else {}

    async def _items_of(self, tenant: str, response_id: str, is_input: bool) -> list[Item]:
        try:
            if is_input:
                return await self.records.input_items(tenant, response_id)
            output: list[Item] = (await self.records.get(tenant, response_id))["output"]
        except (NotStored, TooLong):
            return []
        return output

    async def _history(self, request: ResponseRequest, tenant: str) -> list[Item]:
        try:
            if (previous := request.previous_response_id) is not None:
                return await self.records.history(tenant, previous)
            if request.conversation is not None:
                return await self.items.items(tenant, request.conversation.id)
        except NotStored:
            if previous is not None:
                lost = await self.lost_of(tenant, previous)
                message = f"Previous response with id '{lost}' not found."
                if lost != previous:
                    message += f" '{previous}' goes on from it, and does not hold what was said before."
                raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id") from None
            raise not_found("conversation", request.conversation.id if request.conversation else "") from None
        except TooLong:
            raise invalid("The conversation has more items than this server keeps; begin a new one.", "input") from None
        return []

    async def lost_of(self, tenant: str, response_id: str) -> str:
        """Follow the chain of previous responses back from this one, and return the id of the first that is not stored.
        Returns `response_id` itself if none is missing. A response whose predecessor is missing has lost the
        conversation before it."""
        name = response_id
        with contextlib.suppress(NotStored):
            for _ in range(MAX_CHAIN):
                previous = (await self.records.get(tenant, name)).get("previous_response_id")
                if not isinstance(previous, str):
                    return response_id
                name = previous
        return name

    async def remember(self, turn: ResponseTurn) -> None:
        """Store the response, and append its items to its conversation. What cannot be stored now is kept in memory, to
        be stored later."""
        if (now := time.monotonic()) >= self._sweep_s:
            self._sweep_s = now + SWEEP_S
            with contextlib.suppress(NotStored, ApiError):
                await self.records.sweep()
            with contextlib.suppress(ApiError):
                await self.items.store_kept()
        request, builder = turn.request, turn.builder
        with contextlib.suppress(NotStored, TooLong, ApiError):
            if request.store is not False:
                await self.records.put(turn.tenant, builder.body(), turn.items, request.previous_response_id)
        with contextlib.suppress(NotStored, TooLong):
            if request.conversation is not None and builder.status in ("completed", "incomplete"):
                await self.items.append_turn(turn.tenant, request.conversation.id, [*turn.items, *builder.output])

    async def run_in_background(self, turn: ResponseTurn) -> dict[str, Any]:
        """Store the response, and start a task that generates it. Returns its body in the present state."""
        await self.remember(turn)
        key = turn.tenant, turn.builder.id
        task = asyncio.create_task(self._run(turn))
        self._running[key] = turn, task
        task.add_done_callback(lambda _: self._running.pop(key, None))
        return turn.builder.body()

    async def _run(self, turn: ResponseTurn) -> None:
        try:
            await turn.finish()
        except ApiError as error:
            turn.builder.fail(error)
            await self.remember(turn)
        except Exception:
            log.exception("response %s failed", turn.builder.id)
            turn.builder.fail(ApiError(500, "The server had an error while answering.", code="server_error"))
            await self.remember(turn)

    async def get(self, tenant: str, response_id: str) -> dict[str, Any]:
        """Return a stored or running response. Raises ApiError 404."""
        if (running := self._running.get((tenant, response_id))) is not None:
            return running[0].builder.body()
        try:
            body = await self.records.get(tenant, response_id)
        except NotStored:
            raise not_found("response", response_id) from None
        if body["status"] in _UNFINISHED:  # an earlier run of the server began it
            error = {"code": "server_error", "message": "The server stopped while it was generated."}
            body = {**body, "status": "failed", "error": error}
        return body

    async def cancel(self, tenant: str, response_id: str) -> dict[str, Any]:
        """Cancel a response that runs in the background, and return its body. A response that has ended stays as it is.
        Raises ApiError, also if the response was not created to run in the background."""
        running = self._running.get((tenant, response_id))
        if running is not None:
            await self._stop(*running)
            return running[0].builder.body()
        body = await self.get(tenant, response_id)
        if not body["background"]:
            raise invalid("Only responses in the background can be cancelled.", "response_id")
        return body

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete a response, after cancelling it if it is running. Raises ApiError 404."""
        if (tenant, response_id) in self._running:
            await self.cancel(tenant, response_id)
        try:
            await self.records.delete(tenant, response_id)
        except NotStored:
            raise not_found("response", response_id) from None

    async def close(self) -> None:
        for turn, task in list(self._running.values()):
            await self._stop(turn, task)
        with contextlib.suppress(ApiError):
            await self.records.store_kept()
            await self.items.store_kept()
        await self.store.close()

    async def _stop(self, turn: ResponseTurn, task: "asyncio.Task[None]") -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if turn.builder.status == "in_progress":  # else it has just ended
            turn.builder.cancel()
            await turn.aclose()
            await self.remember(turn)


def not_found(kind: str, name: str) -> ApiError:
    return ApiError(404, f"No {kind} '{name[:200]}' found.", code=f"{kind}_not_found", param=f"{kind}_id")


def framed(events: list[Event]) -> bytes:
    return b"".join(event(said, said["type"]) for said in events)
