"""Stores responses and conversations in Redis, for several servers, as `ResponseStore` stores them in a file.

A record is a hash under `reprise:KIND:TENANT:ID` that names itself, a conversation's items a list beside it. One index
per tenant has the last use of each record; others have the size of each and the sum of a tenant's. Changes that must
happen together are made by one script. One Redis, not a cluster.

Nothing that Redis sends is trusted: replies are bounded while they are read (`redis_reply`), records are checked before
they are used (`stored_records`), and a reply or record that fails this counts as not stored. A Redis that fails is not
called for a while.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from reprise.app.conversations.breaker import Breaker, State
from reprise.app.conversations.response_store import (
    MAX_CHAIN,
    MAX_ITEMS,
    SWEEP_BATCH,
    Item,
    NotStored,
    StoredConversation,
    TooLong,
    not_reachable,
)
from reprise.app.conversations.stored_records import BadRecord, conversation_of, item_of, items_of, response_of, text_of

DEADLINE_S = 3.0  # for one operation, whatever the server or the network does
SOCKET_S = 2.0
PREFIX = "reprise:"
NOT_STORED, TOO_LONG = b"not stored", b"too long"
MAX_RECORD_BYTES = 32 << 20  # most in one reply; half of what a reply may have
MOST_FAILURES, PAUSE_S = 3, 1.0  # after so many failures in a row, Redis is not asked for so long
# Words of the script's error when a key of ours holds something else. A full Redis and the like say other things.
_DAMAGED = ("WRONGTYPE", "attempt to", "bad argument", "not an integer", "not a valid")

log = logging.getLogger(__name__)
_encode = msgspec.json.encode

# ARGV: what to do, now, what is older than that is gone, bytes that all may have, the record's key, and more.
_SCRIPT = """
local what, now, gone, most, key = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local SIZES, HELD = 'reprise:sizes', 'reprise:held'
local left = MAX_RECORD_BYTES

local function tenant_of(key) return string.match(key, '^[^:]*:[^:]*:([^:]*):') end
local function used_of(key) return 'reprise:used:' .. tenant_of(key) end

local function grow(key, bytes)
  redis.call('HINCRBY', SIZES, key, bytes)
  redis.call('HINCRBY', HELD, tenant_of(key), bytes)
end

local function drop(key)
  local tenant, size = tenant_of(key), redis.call('HGET', SIZES, key)
  if size and redis.call('HINCRBY', HELD, tenant, -size) == 0 then redis.call('HDEL', HELD, tenant) end
  redis.call('HDEL', SIZES, key)
  redis.call('ZREM', used_of(key), key)
  redis.call('DEL', key, key .. ':items')
end

local function is_there(key)
  local used = redis.call('ZSCORE', used_of(key), key)
  return used and tonumber(used) > gone
end

local function row_of(key, fields)
  for place = 1, #fields do left = left - redis.call('HSTRLEN', key, fields[place]) end
  return left >= 0 and redis.call('HMGET', key, unpack(fields))
end

local function items_of(key)
  if redis.call('LLEN', key .. ':items') > MAX_ITEMS then return false end
  local items = redis.call('LRANGE', key .. ':items', 0, -1)
  for place = 1, #items do left = left - #items[place] end
  return left >= 0 and items
end

local function make_room()
  while true do
    local held, total, largest, size = redis.call('HGETALL', HELD), 0, nil, 0
    for place = 1, #held, 2 do
      local bytes = tonumber(held[place + 1]) or 0
      total = total + bytes
      if bytes > size then largest, size = held[place], bytes end
    end
    if total <= most or not largest then return end
    local oldest = redis.call('ZRANGE', 'reprise:used:' .. largest, 0, 0)[1]
    if oldest then drop(oldest) else redis.call('HDEL', HELD, largest) end
  end
end

local function write(key, fields)
  drop(key)
  table.insert(fields, 'name')
  table.insert(fields, key)
  local bytes = #key
  for place = 1, #fields do bytes = bytes + #fields[place] end
  redis.call('HSET', key, unpack(fields))
  redis.call('ZADD', used_of(key), now, key)
  grow(key, bytes)
end

local function append(key, from, most_items)
  if redis.call('LLEN', key .. ':items') + #ARGV - from + 1 > most_items then return 'too long' end
  for place = from, #ARGV do
    redis.call('RPUSH', key .. ':items', ARGV[place])
    grow(key, #ARGV[place])
  end
end

if what == 'put' then
  write(key, {'body', ARGV[6], 'input', ARGV[7], 'previous', ARGV[8]})
  make_room()
elseif what == 'create' then
  write(key, {'created', ARGV[7], 'metadata', ARGV[8]})
  local problem = append(key, 9, tonumber(ARGV[6]))
  if problem then drop(key) return problem end
  make_room()
elseif what == 'sweep' then
  for _, tenant in ipairs(redis.call('HKEYS', HELD)) do
    local used = 'reprise:used:' .. tenant
    for _, old in ipairs(redis.call('ZRANGEBYSCORE', used, '-inf', gone, 'LIMIT', 0, ARGV[6])) do drop(old) end
  end
elseif not is_there(key) then
  return 'not stored'
elseif what == 'get' then
  return row_of(key, {'name', 'body', 'input', 'previous'}) or 'not stored'
elseif what == 'chain' then
  local found, beginning = {}, ARGV[6]
  for _ = 1, tonumber(ARGV[7]) + 1 do
    if not is_there(key) then return 'not stored' end
    redis.call('ZADD', used_of(key), now, key)
    local row = row_of(key, {'name', 'body', 'input', 'previous'})
    if not row then return 'too long' end
    table.insert(found, row)
    if row[4] == '' then return found end
    if not row[4] then return 'not stored' end
    key = beginning .. row[4]
  end
  return 'too long'
elseif what == 'drop' then
  drop(key)
else
  redis.call('ZADD', used_of(key), now, key)
  if what == 'update' then
    local before = redis.call('HGET', key, 'metadata')
    redis.call('HSET', key, 'metadata', ARGV[6])
    grow(key, #ARGV[6] - #(before or ''))
  elseif what == 'append' then
    local problem = append(key, 7, tonumber(ARGV[6]))
    if problem then return problem end
    make_room()
  elseif what == 'items' then
    local items = items_of(key)
    return items and {redis.call('HGET', key, 'name'), items} or 'too long'
  elseif what == 'delete item' then
    local found = 0
    for _, item in ipairs(items_of(key) or {}) do
      local is_json, value = pcall(cjson.decode, item)
      if is_json and type(value) == 'table' and value['id'] == ARGV[6] then
        found = found + redis.call('LREM', key .. ':items', 1, item)
        grow(key, -#item)
      end
    end
    if found == 0 then return 'not stored' end
  end
  return row_of(key, {'name', 'created', 'metadata'}) or 'not stored'
end
return {}
""".replace("MAX_RECORD_BYTES", str(MAX_RECORD_BYTES)).replace("MAX_ITEMS", str(MAX_ITEMS))


class RedisStoreUnavailable(Exception):
    """The client is not installed, or the address is not valid."""


class RedisStore:
    """A store of responses and conversations in Redis. Runs on the event loop. Raises NotStored and TooLong, and
    ApiError 503 where Redis does not answer in time."""

    def __init__(self, *, url: str, max_bytes: int, ttl_s: float) -> None:
        """Set up; the first call connects. Raises RedisStoreUnavailable."""
        try:
            from redis.asyncio import Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
            from redis.exceptions import InvalidResponse, ResponseError

            from reprise.app.conversations.redis_reply import CLIENT_FAILURES, BoundedParser
        except ImportError:
            raise RedisStoreUnavailable("cache.redis_url needs redis' client: pip install redis") from None
        self._failures = CLIENT_FAILURES
        self._refused, self._garbage = ResponseError, InvalidResponse
        self._breaker = Breaker(failures=MOST_FAILURES, pause_s=PAUSE_S)
        try:
            self._redis = Redis.from_url(
                url,
                socket_timeout=SOCKET_S,
                socket_connect_timeout=SOCKET_S,
                retry=Retry(NoBackoff(), 1),  # for a connection that has gone stale
                protocol=2,
                parser_class=BoundedParser,
            )
        except ValueError as error:
            raise RedisStoreUnavailable(f"cache.redis_url: {error}") from None
        self._script = self._redis.register_script(_SCRIPT)
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._is_away = self._told_damage = False

    @property
    def state(self) -> State:
        """The state of the circuit breaker; Redis is called while it is closed."""
        return self._breaker.state(time.monotonic())

    @property
    def failures(self) -> int:
        return self._breaker.failures

    async def close(self) -> None:
        """Close the connections. Those that cannot be closed within SOCKET_S, because Redis does not answer, are left
        open."""
        try:
            async with asyncio.timeout(SOCKET_S):
                await self._redis.aclose()
        except self._failures as error:
            log.info("connections to Redis were left open, as it is away: %s", type(error).__name__)

    # --- responses ----------------------------------------------------------------------------------------------------

    async def put(self, tenant: str, body: dict[str, Any], items: list[Item], previous: str | None) -> None:
        """Store a response and its own input items, in place of a response with the same id. previous: id of the
        response that it continues."""
        await self._write("put", _response(tenant, body["id"]), _encode(body), _encode(items), previous or "")

    async def get(self, tenant: str, response_id: str) -> dict[str, Any]:
        key = _response(tenant, response_id)
        async with self._reading(key):
            _, body, _, _ = _named(await self._run("get", key), key)
            return response_of(body, response_id)

    async def input_items(self, tenant: str, response_id: str) -> list[Item]:
        """Return the items that a response was generated from, oldest first: the input and the output of the responses
        that it continues, then its own input."""
        key = _response(tenant, response_id)
        async with self._reading(key):
            _, _, own, previous = _named(await self._run("get", key), key)
            before = await self.history(tenant, text_of(previous)) if previous else []
            return [*before, *items_of(own)]

    async def history(self, tenant: str, response_id: str) -> list[Item]:
        """Return everything that was said up to and including a response, oldest first."""
        key = _response(tenant, response_id)
        turns, name = [], response_id
        async with self._reading(key):
            chain = await self._run("chain", key, _response(tenant, ""), MAX_CHAIN)
            if not chain:
                raise BadRecord("a part of it is missing")
            for row in chain:
                _, body, items, previous = _named(row, _response(tenant, name))
                turns.append([*items_of(items), *response_of(body, name)["output"]])
                name = text_of(previous)
        if sum(map(len, turns)) > MAX_ITEMS:
            raise TooLong(response_id)
        return [item for turn in reversed(turns) for item in turn]

    async def delete(self, tenant: str, response_id: str) -> None:
        await self._write("drop", _response(tenant, response_id))

    # --- conversations ------------------------------------------------------------------------------------------------

    async def create(
        self, tenant: str, conversation_id: str, metadata: dict[str, str], items: list[Item]
    ) -> StoredConversation:
        """Store a new conversation. items: its first items, which have ids."""
        created = int(time.time())
        key = _conversation(tenant, conversation_id)
        await self._write("create", key, MAX_ITEMS, created, _encode(metadata), *self._bodies(key, items))
        return StoredConversation(conversation_id, created, metadata)

    async def conversation(self, tenant: str, conversation_id: str) -> StoredConversation:
        return await self._about("touch", tenant, conversation_id)

    async def update(self, tenant: str, conversation_id: str, metadata: dict[str, str]) -> StoredConversation:
        return await self._about("update", tenant, conversation_id, _encode(metadata))

    async def forget(self, tenant: str, conversation_id: str) -> None:
        await self._write("drop", _conversation(tenant, conversation_id))

    async def append(self, tenant: str, conversation_id: str, items: list[Item]) -> None:
        bodies = self._bodies(conversation_id, items)
        await self._about("append", tenant, conversation_id, MAX_ITEMS, *bodies)

    async def items(self, tenant: str, conversation_id: str) -> list[Item]:
        """Return all items of a conversation, oldest first."""
        key = _conversation(tenant, conversation_id)
        async with self._reading(key):
            _, items = _named(await self._run("items", key), key, 2)
            if not isinstance(items, list):
                raise BadRecord("its items are missing")
            return [item_of(item) for item in items]

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> StoredConversation:
        return await self._about("delete item", tenant, conversation_id, item_id)

    async def sweep(self) -> None:
        """Delete the records whose last use is longer ago than the time to live, a bounded number per call."""
        await self._write("sweep", "", SWEEP_BATCH)

    def _bodies(self, name: str, items: list[Item]) -> list[bytes]:
        """Return items as they are stored. Raises TooLong if they have no room even alone: all else would be evicted
        for them."""
        bodies = [_encode(item) for item in items]
        if sum(map(len, bodies)) > self._max_bytes:
            raise TooLong(name)
        return bodies

    async def _about(
        self, what: str, tenant: str, conversation_id: str, *values: str | bytes | int
    ) -> StoredConversation:
        key = _conversation(tenant, conversation_id)
        async with self._reading(key):
            _, created, metadata = _named(await self._run(what, key, *values), key, 3)
            return conversation_of(created, metadata, conversation_id)

    @asynccontextmanager
    async def _reading(self, key: str) -> AsyncIterator[None]:
        """Turn a BadRecord that the `async with` body raises into NotStored, and log it the first time."""
        try:
            yield
        except BadRecord as error:
            if not self._told_damage:
                log.error("a record in Redis is damaged, and so not there: %.200s", error)
            self._told_damage = True
            raise NotStored(key) from None

    async def _write(self, what: str, key: str, *values: str | bytes | int) -> None:
        """Change a record in Redis. what: the operation of the store's Lua script. key: the record. values: the
        operation's arguments. Raises ApiError if Redis does not confirm the change."""
        try:
            await self._run(what, key, *values)
        except BadRecord:
            raise not_reachable() from None

    async def _run(self, what: str, key: str, *values: str | bytes | int) -> list[Any]:
        """Run an operation of the store's Lua script and return its reply. what: the operation. key: the record.
        values: the operation's arguments. Raises ApiError while Redis is away, and BadRecord if Redis finds other data
        than the script writes."""
        if not self._breaker.allows(time.monotonic()):
            raise not_reachable()
        now = time.time()
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer = await self._script(
                    args=[what, repr(now), repr(now - self._ttl_s), self._max_bytes, key, *values]
                )
        except self._failures as error:
            if isinstance(error, self._refused) and any(words in str(error) for words in _DAMAGED):
                self._breaker.succeeded()
                raise BadRecord(str(error)) from None
            self._breaker.failed(time.monotonic())
            if not self._is_away:
                log.error("Redis does not answer: %s", type(error).__name__)
            self._is_away = True
            if isinstance(error, self._garbage):
                raise BadRecord(str(error)) from None
            raise not_reachable() from None
        self._breaker.succeeded()
        self._is_away = False
        if answer == NOT_STORED:
            raise NotStored(key)
        if answer == TOO_LONG:
            raise TooLong(key)
        if not isinstance(answer, list):
            raise BadRecord("no reply to that")
        return answer


def _named(row: object, key: str, size: int = 4) -> list[Any]:
    """Return the `size` fields of a record that Redis has returned. The first one must be the record's own `key`.
    Raises BadRecord."""
    if not isinstance(row, list) or len(row) != size:
        raise BadRecord("a part of it is missing")
    if row[0] != key.encode():
        raise BadRecord("it names another")
    return row


def _response(tenant: str, response_id: str) -> str:
    return f"{PREFIX}response:{tenant}:{response_id}"


def _conversation(tenant: str, conversation_id: str) -> str:
    return f"{PREFIX}conversation:{tenant}:{conversation_id}"
