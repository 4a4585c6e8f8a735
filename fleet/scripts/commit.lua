-- Ends a turn: writes a session's head and transcript, if nobody has claimed the session since.
-- Answers {'committed', epoch, turn, tenant's sessions, tenant's bytes}, {'fenced'}, {'gone'} or {'flushed'}.
-- ARGV: as named below, then so many chains, then digests of answers and their transcript rows in turn
local born, replica, boot, epoch, since, base, nonce, ends, id, tenant, name, member = unpack(ARGV, 1, 12)
local tokens, bytes, in_redis, lives, head, chain_value = unpack(ARGV, 13, 18)
local most_bytes, most_rows, most_sessions, most_said, most_chains, chains = unpack(ARGV, 19, 24)
local first_chain, first_row = 25, 25 + chains
lives = tonumber(lives)
local record, names, by_use, held = record_of(tenant, member), names_of(name), by_use_of(tenant), held_of(tenant)
local transcript = transcript_of(tenant, member)

if redis.call('GET', BORN) ~= born then return {'flushed'} end
local is_claimed = epoch ~= '0'
local home, booted, newest, turn, last = unpack(redis.call('HMGET', record, 'home', 'boot', 'epoch', 'turn', 'nonce'))
local kept = redis.call('HGET', record, 'ttl')
-- One that is pinned stays so until a client ends that, and a newer head is no use.
if kept and (kept == '-1' or ends == '0') then lives = tonumber(kept) end
local deleted = tonumber(redis.call('ZSCORE', FORGOTTEN, name) or '0')
if deleted > tonumber(is_claimed and epoch or since) or (is_claimed and not newest) then return {'gone'} end

local function keep_conversation()
  local size, fresh = 0, {} -- a replica may send again what is there
  for place = first_row, #ARGV, 2 do
    if redis.call('HEXISTS', transcript, ARGV[place]) == 0 then
      table.insert(fresh, place)
      size = size + #ARGV[place + 1]
    end
  end
  local rows = redis.call('HLEN', transcript) + #fresh
  if size + (redis.call('HGET', transcript, 'size') or 0) <= tonumber(most_bytes) and rows <= tonumber(most_rows) then
    for _, place in ipairs(fresh) do redis.call('HSET', transcript, ARGV[place], ARGV[place + 1]) end
    if size > 0 then redis.call('HINCRBY', transcript, 'size', size) end
  end
  live(transcript, lives)
  local session, bytes = string.match(member, ':(.*)$'), redis.call('HGET', transcript, 'size')
  if bytes then
    local left, left_of_sizes = redis.call('PTTL', said_of(tenant)), redis.call('PTTL', sizes_of(tenant))
    redis.call('HINCRBY', sizes_of(tenant), 'total', bytes - (redis.call('HGET', sizes_of(tenant), session) or 0))
    redis.call('HSET', sizes_of(tenant), session, bytes)
    redis.call('ZADD', said_of(tenant), string.format('%.0f', now_us), session)
    live_at_least(said_of(tenant), lives, left)
    live_at_least(sizes_of(tenant), lives, left_of_sizes)
    tidy_said(tenant, session, tonumber(most_said))
  end
  for place = first_chain, first_row - 1 do
    if redis.call('GET', ARGV[place]) ~= chain_value then
      redis.call('SET', ARGV[place], chain_value)
      redis.call('LREM', chains_of(tenant, member), 0, ARGV[place]) -- another session had it meanwhile
      redis.call('RPUSH', chains_of(tenant, member), ARGV[place])
    end
    live(ARGV[place], lives)
  end
  forget_chains(tenant, member, tonumber(most_chains))
  live(chains_of(tenant, member), lives)
end

local function answer()
  return {'committed', redis.call('HGET', record, 'epoch'), redis.call('HGET', record, 'turn'),
    redis.call('ZCARD', by_use), redis.call('HGET', held, 'total') or '0'}
end

local is_mine
if is_claimed then
  is_mine = newest == epoch
else
  is_mine = not newest or ((home == replica or home == '') and turn == base)
end
if newest and last == nonce and home == replica then return answer() end -- it came twice
if not is_mine then
  if #ARGV >= first_row then redis.call('HINCRBY', transcript, 'branches', 1) end
  keep_conversation()
  return {'fenced'}
end
local left, left_of_names, left_of_held = redis.call('PTTL', by_use), redis.call('PTTL', names), redis.call('PTTL', held)
if not is_claimed and (home ~= replica or booted ~= boot) then
  redis.call('HSET', record, 'home', replica, 'boot', boot, 'epoch', next_epoch(), 'id', id, 'named', name)
end
redis.call('HSETNX', record, 'begun', since)
redis.call('HINCRBY', record, 'turn', ends)
redis.call('HSET', record, 'nonce', nonce, 'used', now, 'tokens', tokens, 'bytes', bytes, 'in_redis', in_redis, 'ttl',
  lives)
if ends ~= '0' then redis.call('HDEL', record, 'runs') end
if head ~= '' then redis.call('HSET', record, 'head', head) end
live(record, lives)
keep_conversation()
local counted = redis.call('HGET', held, member)
redis.call('SADD', names, member)
redis.call('ZADD', by_use, string.format('%.0f', now_us), member)
redis.call('HSET', held, member, bytes)
redis.call('HINCRBY', held, 'total', bytes - (counted or 0))
if redis.call('SCARD', names) == 1 then live(names, lives) else live_at_least(names, lives, left_of_names) end
live_at_least(by_use, lives, left)
live_at_least(held, lives, left_of_held)

tidy(tenant, member, tonumber(most_sessions))
return answer()
