-- Changes how long the sessions of a name live after their last use; negative: they are pinned. Answers {'kept'}.
-- ARGV: tenant, name, milliseconds
local tenant, name, lives = ARGV[1], ARGV[2], tonumber(ARGV[3])
if redis.call('SCARD', names_of(name)) == 1 then live(names_of(name), lives) end
for _, member in ipairs(redis.call('SMEMBERS', names_of(name))) do
  local record = record_of(tenant, member)
  if redis.call('EXISTS', record) == 1 then
    redis.call('HSET', record, 'ttl', lives)
    live(record, lives)
    for _, key in ipairs({transcript_of(tenant, member), chains_of(tenant, member)}) do live(key, lives) end
    for _, chain in ipairs(redis.call('LRANGE', chains_of(tenant, member), 0, -1)) do
      if redis.call('GET', chain) == member then live(chain, lives) end -- else it leaves with another session
    end
  end
end
for _, key in ipairs({names_of(name), by_use_of(tenant), held_of(tenant), said_of(tenant), sizes_of(tenant)}) do
  live_at_least(key, lives, redis.call('PTTL', key))
end
return {'kept'}
