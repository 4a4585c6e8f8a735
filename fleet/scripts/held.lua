-- Tells what a tenant holds, and which sessions could leave. Answers {'held', sessions, bytes of their KV, and for each
-- place in the order of their last use the session's name, or '' if it stays: it is pinned, running, or the newest}.
-- ARGV: tenant, first place, number of places, milliseconds after which a turn that was begun does not run any more
local tenant, first, count, longest = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local by_use, names = by_use_of(tenant), {}
local newest = redis.call('ZRANGE', by_use, -1, -1)[1]
local found = count > 0 and redis.call('ZRANGE', by_use, first, first + count - 1) or {}
for _, member in ipairs(found) do
  local named, ttl, runs = unpack(redis.call('HMGET', record_of(tenant, member), 'named', 'ttl', 'runs'))
  if not named then
    uncount(tenant, member)
  elseif member == newest or ttl == '-1' or (runs and now - runs < longest) then
    table.insert(names, '')
  else
    table.insert(names, named)
  end
end
return {'held', redis.call('ZCARD', by_use), redis.call('HGET', held_of(tenant), 'total') or '0', names}
