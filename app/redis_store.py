"""Responses and conversations in Redis, for several servers: as `ResponseStore` keeps them, and bounded like it.

A record is a hash under `reprise:KIND:TENANT:ID`, a conversation's items a list beside it; an index per tenant knows
when each was used last, others how large each is and what a tenant holds. Whatever has to happen at once happens in one
script. One Redis, not a cluster.
"""

import asyncio
import logging
import time
from typing import Any

import msgspec

from app.errors import ApiError, unavailable
from app.response_store import MAX_CHAIN, MAX_ITEMS, SWEEP_BATCH, Conversation, Item, NotStored, TooLong

DEADLINE_S = 3.0  # of one operation, whatever the server or the network does
SOCKET_S = 2.0
PREFIX = "reprise:"
NOT_STORED, TOO_LONG = b"not stored", b"too long"

log = logging.getLogger(__name__)
_encode = msgspec.json.encode
_decode = msgspec.json.decode

# ARGV: what to do, now, what is older than that is gone, bytes that all may have, the record's key, and more.
_SCRIPT = """
local what, now, gone, most, key = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local SIZES, HELD = 'reprise:sizes', 'reprise:held'

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

local function make_room()
  while true do
    local held, total, largest, size = redis.call('HGETALL', HELD), 0, nil, 0
    for place = 1, #held, 2 do
      local bytes = tonumber(held[place + 1])
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
  return redis.call('HMGET', key, 'body', 'input', 'previous')
elseif what == 'chain' then
  local found, beginning = {}, ARGV[6]
  for _ = 1, tonumber(ARGV[7]) + 1 do
    if not is_there(key) then return 'not stored' end
    redis.call('ZADD', used_of(key), now, key)
    local row = redis.call('HMGET', key, 'input', 'body', 'previous')
    table.insert(found, row)
    if row[3] == '' then return found end
    key = beginning .. row[3]
  end
  return 'too long'
elseif what == 'drop' then
  drop(key)
else
  redis.call('ZADD', used_of(key), now, key)
  if what == 'update' then
    local before = redis.call('HGET', key, 'metadata')
    redis.call('HSET', key, 'metadata', ARGV[6])
    grow(key, #ARGV[6] - #before)
  elseif what == 'append' then
    local problem = append(key, 7, tonumber(ARGV[6]))
    if problem then return problem end
    make_room()
  elseif what == 'items' then
    return redis.call('LRANGE', key .. ':items', 0, -1)
  elseif what == 'delete item' then
    local found = 0
    for _, item in ipairs(redis.call('LRANGE', key .. ':items', 0, -1)) do
      if cjson.decode(item)['id'] == ARGV[6] then
        found = found + redis.call('LREM', key .. ':items', 1, item)
        grow(key, -#item)
      end
    end
    if found == 0 then return 'not stored' end
  end
  return redis.call('HMGET', key, 'created', 'metadata')
end
return {}
"""


class RedisStoreUnavailable(Exception):
    """The client is not installed, or the address is none."""


class RedisStore:
    """On the event loop. Raises NotStored and TooLong, and ApiError 503 where Redis does not answer in time."""

    def __init__(self, *, url: str, max_bytes: int, ttl_s: float) -> None:
        """Connects when it is first asked. Raises RedisStoreUnavailable."""
        try:
            from redis.asyncio import Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
            from redis.exceptions import RedisError
        except ImportError:
            raise RedisStoreUnavailable("cache.redis_url needs redis' client: pip install redis") from None
        self._failures = (RedisError, OSError, TimeoutError)
        try:
            self._redis = Redis.from_url(
                url,
                socket_timeout=SOCKET_S,
                socket_connect_timeout=SOCKET_S,
                retry=Retry(NoBackoff(), 1),  # a connection that has gone stale
            )
        except ValueError as error:
            raise RedisStoreUnavailable(f"cache.redis_url: {error}") from None
        self._script = self._redis.register_script(_SCRIPT)
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._is_away = False

    async def close(self) -> None:
        await self._redis.aclose()

    # --- responses ----------------------------------------------------------------------------------------------------

    async def put(self, tenant: str, body: dict[str, Any], items: list[Item], previous: str | None) -> None:
        """A response and its own input items; replaces one of the same id."""
        await self._run("put", _response(tenant, body["id"]), _encode(body), _encode(items), previous or "")

    async def get(self, tenant: str, response_id: str) -> dict[str, Any]:
        body, _, _ = await self._run("get", _response(tenant, response_id))
        found: dict[str, Any] = _decode(body)
        return found

    async def input_items(self, tenant: str, response_id: str) -> list[Item]:
        """Of the response itself and of all it goes on from, oldest first, without its own output."""
        _, own, previous = await self._run("get", _response(tenant, response_id))
        before = await self.history(tenant, previous.decode()) if previous else []
        return [*before, *_decode(own)]

    async def history(self, tenant: str, response_id: str) -> list[Item]:
        """All that was said up to and with a response, oldest first."""
        key = _response(tenant, response_id)
        chain = await self._run("chain", key, _response(tenant, ""), MAX_CHAIN)
        turns = [[*_decode(items), *_decode(body)["output"]] for items, body, _ in chain]
        if sum(map(len, turns)) > MAX_ITEMS:
            raise TooLong(response_id)
        return [item for turn in reversed(turns) for item in turn]

    async def delete(self, tenant: str, response_id: str) -> None:
        await self._run("drop", _response(tenant, response_id))

    # --- conversations ------------------------------------------------------------------------------------------------

    async def create(
        self, tenant: str, conversation_id: str, metadata: dict[str, str], items: list[Item]
    ) -> Conversation:
        """Items have ids."""
        created = int(time.time())
        key = _conversation(tenant, conversation_id)
        await self._run("create", key, MAX_ITEMS, created, _encode(metadata), *map(_encode, items))
        return Conversation(conversation_id, created, metadata)

    async def conversation(self, tenant: str, conversation_id: str) -> Conversation:
        return await self._about("touch", tenant, conversation_id)

    async def update(self, tenant: str, conversation_id: str, metadata: dict[str, str]) -> Conversation:
        return await self._about("update", tenant, conversation_id, _encode(metadata))

    async def forget(self, tenant: str, conversation_id: str) -> None:
        await self._run("drop", _conversation(tenant, conversation_id))

    async def append(self, tenant: str, conversation_id: str, items: list[Item]) -> None:
        await self._about("append", tenant, conversation_id, MAX_ITEMS, *map(_encode, items))

    async def items(self, tenant: str, conversation_id: str) -> list[Item]:
        """All of them, oldest first."""
        return [_decode(item) for item in await self._run("items", _conversation(tenant, conversation_id))]

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> Conversation:
        return await self._about("delete item", tenant, conversation_id, item_id)

    async def sweep(self) -> None:
        """What nobody has used for its time to live, a bounded number per call."""
        await self._run("sweep", "", SWEEP_BATCH)

    async def _about(self, what: str, tenant: str, conversation_id: str, *values: str | bytes | int) -> Conversation:
        created, metadata = await self._run(what, _conversation(tenant, conversation_id), *values)
        return Conversation(conversation_id, int(created), _decode(metadata))

    async def _run(self, what: str, key: str, *values: str | bytes | int) -> list[Any]:
        now = time.time()
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer = await self._script(
                    args=[what, repr(now), repr(now - self._ttl_s), self._max_bytes, key, *values]
                )
        except self._failures as error:
            if not self._is_away:
                log.error("Redis does not answer: %s", type(error).__name__)
            self._is_away = True
            raise _away() from None
        self._is_away = False
        if answer == NOT_STORED:
            raise NotStored(key)
        if answer == TOO_LONG:
            raise TooLong(key)
        found: list[Any] = answer
        return found


def _response(tenant: str, response_id: str) -> str:
    return f"{PREFIX}response:{tenant}:{response_id}"


def _conversation(tenant: str, conversation_id: str) -> str:
    return f"{PREFIX}conversation:{tenant}:{conversation_id}"


def _away() -> ApiError:
    return unavailable(
        "Responses and conversations cannot be reached right now.", code="unavailable", retry_after_s=5.0
    )
