-- Takes places of a tenant for one answer. They come back when the lease is given back, or at its end if its gateway is
-- gone. Answers {'entered' or 'full', places in use}.
-- ARGV: key, lease, places that it takes, places that the tenant may have, milliseconds of the lease
local key, lease, count, most, lives = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
local held = 0
for _, one in ipairs(redis.call('ZRANGE', key, 0, -1)) do held = held + tonumber(string.match(one, '^%d+')) end
if held + count > most then return {'full', held} end
local left = redis.call('PTTL', key)
redis.call('ZADD', key, now + lives, count .. ':' .. lease)
live_at_least(key, lives, left)
return {'entered', held + count}
