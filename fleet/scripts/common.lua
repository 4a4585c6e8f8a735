-- Stands before every script. One Redis, not a cluster: the names of keys are made here, as in fleet/keys.py.
local BORN, EPOCH, CHECK = 'r1:born', 'r1:epoch', 'r1:check'
local MEMBERS, BEATEN = 'r1:m', 'r1:ma'
local FORGOTTEN, TRIMMED = 'r1:x', 'r1:xl'
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now = math.floor(now_us / 1000)

local function record_of(tenant, member)
  local fingerprint, session = string.match(member, '^([^:]*):(.*)$')
  return 'r1:s:' .. fingerprint .. ':' .. tenant .. ':' .. session
end
local function transcript_of(tenant, member) return 'r1:t:' .. tenant .. ':' .. string.match(member, ':(.*)$') end
local function names_of(name) return 'r1:n:' .. name end
local function by_use_of(tenant) return 'r1:i:' .. tenant end
local function held_of(tenant) return 'r1:h:' .. tenant end
local function said_of(tenant) return 'r1:w:' .. tenant end -- sorted set: sessions with a transcript by their last use
local function sizes_of(tenant) return 'r1:b:' .. tenant end -- hash: bytes of these transcripts, and their total
-- list: the r1:c keys that lead to a session; those of a pinned one have no end of their own and leave with it
local function chains_of(tenant, member) return 'r1:g:' .. tenant .. ':' .. member end
local function waiting_of(epoch) return 'r1:d:' .. epoch end

-- Returns an epoch that no other is higher than, as text: a clock in microseconds that never goes back.
local function next_epoch()
  local epoch = string.format('%.0f', math.max(tonumber(redis.call('GET', EPOCH) or '0') + 1, now_us))
  redis.call('SET', EPOCH, epoch)
  return epoch
end

-- Lets a key live for so many milliseconds, or for ever if negative.
local function live(key, milliseconds)
  if milliseconds < 0 then redis.call('PERSIST', key) else redis.call('PEXPIRE', key, milliseconds) end
end

-- Likewise for a key that several sessions share: it lives as long as the longest of them. `left` is its PTTL before.
local function live_at_least(key, milliseconds, left)
  if left == -1 then return end
  if milliseconds < 0 or left < milliseconds then live(key, milliseconds) end
end

-- Removes a session's bytes from what its tenant holds.
local function uncount(tenant, member)
  redis.call('ZREM', by_use_of(tenant), member)
  local bytes = redis.call('HGET', held_of(tenant), member)
  if bytes then
    redis.call('HDEL', held_of(tenant), member)
    redis.call('HINCRBY', held_of(tenant), 'total', 0 - bytes)
  end
end

-- Removes a transcript. It may be of sessions of several models.
local function forget_said(tenant, session)
  redis.call('UNLINK', 'r1:t:' .. tenant .. ':' .. session)
  redis.call('ZREM', said_of(tenant), session)
  local bytes = redis.call('HGET', sizes_of(tenant), session)
  if bytes then
    redis.call('HDEL', sizes_of(tenant), session)
    redis.call('HINCRBY', sizes_of(tenant), 'total', 0 - bytes)
  end
end

-- Removes what leads to a session by its oldest answers, until there are so few.
local function forget_chains(tenant, member, kept)
  local chains = chains_of(tenant, member)
  for _ = kept + 1, redis.call('LLEN', chains) do
    local chain = redis.call('LPOP', chains)
    if redis.call('GET', chain) == member then redis.call('DEL', chain) end
  end
end

-- Removes all that the directory has of a session.
local function drop(tenant, member)
  local record = record_of(tenant, member)
  local name = redis.call('HGET', record, 'named')
  redis.call('DEL', record)
  forget_said(tenant, string.match(member, ':(.*)$'))
  forget_chains(tenant, member, 0)
  if name then redis.call('SREM', names_of(name), member) end
  uncount(tenant, member)
end

-- Drops the transcripts used longest ago, but `kept`, while a tenant's have more bytes than they may.
local function tidy_said(tenant, kept, most)
  while tonumber(redis.call('HGET', sizes_of(tenant), 'total') or '0') > most do
    local oldest = redis.call('ZRANGE', said_of(tenant), 0, 0)[1]
    if not oldest or oldest == kept then return end
    forget_said(tenant, oldest)
  end
end

-- Uncounts expired sessions, a few at a time; drops the ones used longest ago, but `kept`, where a tenant has too many.
local function tidy(tenant, kept, most)
  local surplus = redis.call('ZCARD', by_use_of(tenant)) - most
  for place, oldest in ipairs(redis.call('ZRANGE', by_use_of(tenant), 0, 3)) do
    if redis.call('EXISTS', record_of(tenant, oldest)) == 0 then
      uncount(tenant, oldest)
    elseif place <= surplus and oldest ~= kept then
      drop(tenant, oldest)
    end
  end
end
