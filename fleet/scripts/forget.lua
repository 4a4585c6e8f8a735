-- Deletes the sessions of a name and tells all replicas to.
-- Answers {'forgotten', epoch, live members other than this one, number of deleted sessions}, or {'flushed'}.
-- ARGV: born, replica, tenant, name, milliseconds after which a silent member is not waited for, most deletions that
--       are remembered, microseconds for which they are
local born, replica, tenant, name, silent, most, age = unpack(ARGV)
if redis.call('GET', BORN) ~= born then return {'flushed'} end
local members = redis.call('SMEMBERS', names_of(name))
for _, member in ipairs(members) do
  drop(tenant, member) -- before anything is written: a full Redis lets those write who have made room
end
redis.call('DEL', names_of(name))
local epoch = next_epoch()
redis.call('ZADD', FORGOTTEN, epoch, name)
local surplus = math.max(0, redis.call('ZCARD', FORGOTTEN) - most)
local old = redis.call('ZRANGEBYSCORE', FORGOTTEN, '-inf', string.format('%.0f', epoch - age), 'LIMIT', 0, 100)
local trimmed = math.max(surplus, #old)
if trimmed > 0 then
  redis.call('SET', TRIMMED, redis.call('ZRANGE', FORGOTTEN, trimmed - 1, trimmed - 1, 'WITHSCORES')[2])
  redis.call('ZREMRANGEBYRANK', FORGOTTEN, 0, trimmed - 1)
end
local waiting = {}
for _, other in ipairs(redis.call('ZRANGEBYSCORE', BEATEN, now - silent, '+inf')) do
  if other ~= replica then
    table.insert(waiting, other)
    redis.call('SADD', waiting_of(epoch), other)
  end
end
redis.call('PEXPIRE', waiting_of(epoch), 3600000)
return {'forgotten', epoch, waiting, #members}
