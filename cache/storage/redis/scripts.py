"""Defines the scripts that keep records of the extents in Redis. Redis carries out each as one step.

    r1:k:FINGERPRINT:NAME      hash: `h` the extent's header, `s` the key of its session's set, and `0`, `1`, ... its
                               bytes in fields of FIELD_BYTES
    r1:ks:SESSION              set: keys of the extents of the sessions of one id, with any salt and of any model, so
                               that any server may delete them
    r1:kz                      sorted set: every key of an extent -> Unix time of its next expected use
    r1:kb                      hash: every key of an extent -> bytes; "" -> bytes of all

Extents are immutable and named by their contents, so writing one twice is harmless. An extent counts as stored only
when it has its header, which is written last. If a key vanishes by itself (by its time to live or Redis' own eviction),
the records still list it. So every publication checks a few listed keys chosen at random.
"""

SIZES = b"r1:kb"

_DROP = """
local function drop(key)
  redis.call('UNLINK', key)
  redis.call('ZREM', 'r1:kz', key)
  local size = redis.call('HGET', 'r1:kb', key)
  if size then
    redis.call('HDEL', 'r1:kb', key)
    redis.call('HINCRBY', 'r1:kb', '', -tonumber(size))
  end
end
"""

_KEEP = """
local function keep(key, ttl)
  local session = redis.call('HGET', key, 's')
  if session then redis.call('SADD', session, key) end
  for _, one in ipairs({key, session or nil}) do
    if redis.call('TTL', one) < ttl then redis.call('EXPIRE', one, ttl) end
  end
end
"""

PUBLISH = (
    _DROP
    + _KEEP
    + """
local key, session = KEYS[1], KEYS[2]
local header, use = ARGV[2], ARGV[5]
local fields, size, ttl, budget = tonumber(ARGV[1]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[6])
if redis.call('HEXISTS', key, 'h') == 0 then
  if redis.call('HLEN', key) ~= fields then
    drop(key)
    return 'lost'
  end
  redis.call('EXPIRE', key, ttl)  -- instead of the time that an unfinished one has
end
redis.call('HSET', key, 'h', header, 's', session)
keep(key, ttl)
redis.call('ZADD', 'r1:kz', use, key)
if redis.call('HSETNX', 'r1:kb', key, size) == 1 then
  redis.call('HINCRBY', 'r1:kb', '', size)
end
for _, other in ipairs(redis.call('ZRANDMEMBER', 'r1:kz', 4)) do
  if redis.call('EXISTS', other) == 0 then drop(other) end
end
local now = tonumber(redis.call('TIME')[1])
for _ = 1, 256 do
  if budget == 0 or tonumber(redis.call('HGET', 'r1:kb', '')) <= budget then break end
  local late = redis.call('ZRANGE', 'r1:kz', 0, 0, 'WITHSCORES')
  local far = redis.call('ZRANGE', 'r1:kz', -1, -1, 'WITHSCORES')
  if not far[1] then break end
  -- One that did not come when it was expected is taken to stay away for as long again.
  if now - tonumber(late[2]) > tonumber(far[2]) - now then drop(late[1]) else drop(far[1]) end
end
return redis.call('EXISTS', key) == 1 and 'stored' or 'full'
"""
)
"""Publishes an extent. Keys: extent, session; arguments: number of fields, header, bytes, seconds to live, Unix time of
the next expected use, most bytes of all extents (0: no bound). Returns `stored`, `lost` if fields are missing, or
`full` if this extent has the latest next use. To make room, extents with the latest next use leave (Belady), whichever
server wrote them."""

RENEW = (
    _KEEP
    + """
local there = {}
for place, key in ipairs(KEYS) do
  there[place] = redis.call('HEXISTS', key, 'h')
  if there[place] == 1 then
    keep(key, tonumber(ARGV[1]))
    redis.call('ZADD', 'r1:kz', 'XX', ARGV[2], key)
  end
end
return there
"""
)
"""Extends the life of extents. Keys: extents; arguments: seconds to live, Unix time of the next expected use. Returns
for each whether Redis has it. The set of its session lives at least as long, so that a deletion finds it."""

DROP = (
    _DROP
    + """
for _, key in ipairs(KEYS) do drop(key) end
return 'OK'
"""
)
"""Deletes extents, whatever is wrong with them. Keys: extents."""

DELETE = (
    _DROP
    + """
for _, session in ipairs(KEYS) do
  for _, key in ipairs(redis.call('SMEMBERS', session)) do drop(key) end
  redis.call('DEL', session)
end
return 'OK'
"""
)
"""Deletes all extents of sessions. Keys: the sessions' sets."""
