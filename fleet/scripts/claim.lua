-- Makes a replica the home of a session, which is begun if it is not there.
-- Answers {'claimed', epoch, turn, home before, epoch of the name's deletion, tokens, head, branches}, or {'flushed'}.
-- ARGV: born, replica, boot, session id, tenant, name, member, milliseconds that a new session lives, most sessions of a
--       tenant, epoch at which the replica's copy of the session was begun or 0
local born, replica, boot, id, tenant, name, member, lives, most_sessions, begun = unpack(ARGV)
if redis.call('GET', BORN) ~= born then return {'flushed'} end
local record, names, by_use = record_of(tenant, member), names_of(name), by_use_of(tenant)
local home, booted, epoch, turn, tokens, head, ttl =
  unpack(redis.call('HMGET', record, 'home', 'boot', 'epoch', 'turn', 'tokens', 'head', 'ttl'))
local left, left_of_names = redis.call('PTTL', by_use), redis.call('PTTL', names)
lives = tonumber(ttl or lives)
if home ~= replica or booted ~= boot then
  epoch = next_epoch()
  redis.call('HSET', record, 'home', replica, 'boot', boot, 'epoch', epoch, 'id', id, 'named', name)
end
redis.call('HSETNX', record, 'turn', 0)
redis.call('HSETNX', record, 'begun', begun == '0' and epoch or begun)
redis.call('HSET', record, 'used', now, 'runs', now)
redis.call('HDEL', record, 'wanted')
live(record, lives)
redis.call('SADD', names, member)
live_at_least(names, lives, left_of_names)
redis.call('ZADD', by_use, string.format('%.0f', now_us), member)
live_at_least(by_use, lives, left)
tidy(tenant, member, tonumber(most_sessions))
return {'claimed', epoch, turn or '0', home or '', redis.call('ZSCORE', FORGOTTEN, name) or '0', tokens or '0',
  head or '', redis.call('HGET', transcript_of(tenant, member), 'branches') or '0'}
