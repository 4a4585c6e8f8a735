-- Ends a turn: writes a session's head and transcript, if nobody has claimed the session since.
-- Answers {'committed', epoch, turn, tenant's sessions, tenant's bytes}, {'fenced'}, {'gone'} or {'flushed'}.
-- ARGV: as named below, then so many chains, then digests of answers and their transcript rows in turn
local born, replica, boot, epoch, since, base, nonce, ends, id, tenant, name, member = unpack(ARGV, 1, 12)
local tokens, bytes, in_redis, lives, head, chain_value = unpack(ARGV, 13, 18)
local most_bytes, most_rows, most_sessions, chains = unpack(ARGV, 19, 22)
local first_chain, first_row = 23, 23 + chains
lives = tonumber(lives)
local record, names, by_use, held = record_of(tenant, member), names_of(name), by_use_of(tenant), held_of(tenant)
local transcript = transcript_of(tenant, member)

if redis.call('GET', BORN) ~= born then return {'flushed'} end
local is_claimed = epoch ~= '0'
local home, booted, newest, turn, last = unpack(redis.call('HMGET', record, 'home', 'boot', 'epoch', 'turn', 'nonce'))
local deleted = tonumber(redis.call('ZSCORE', FORGOTTEN, name) or '0')
if deleted > tonumber(is_claimed and epoch or since) or (is_claimed and not newest) then return {'gone'} end

local function keep_conversation()
  local size = tonumber(redis.call('HGET', transcript, 'size') or '0')
  for place = first_row, #ARGV, 2 do size = size + #ARGV[place + 1] end
  local rows = redis.call('HLEN', transcript) + (#ARGV + 1 - first_row) / 2
  if size <= tonumber(most_bytes) and rows <= tonumber(most_rows) then
    for place = first_row, #ARGV, 2 do
      if redis.call('HSETNX', transcript, ARGV[place], ARGV[place + 1]) == 1 then
        redis.call('HINCRBY', transcript, 'size', #ARGV[place + 1])
      end
    end
  end
  live(transcript, lives)
  for place = first_chain, first_row - 1 do
    redis.call('SET', ARGV[place], chain_value)
    live(ARGV[place], lives)
  end
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
  keep_conversation()
  if #ARGV >= first_row then redis.call('HINCRBY', record, 'branches', 1) end
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
