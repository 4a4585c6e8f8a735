-- Takes a replica's beat. Answers {'heard', born, last epoch, highest trimmed epoch, deleted names and their epochs},
-- or {'foreign'} to a replica with another secret.
-- ARGV: replica, beat, id for a new data set, digest of the secret, epoch from which deletions are asked, most
--       deletions, milliseconds after which a silent member is removed
local replica, beat, new, check, since, most, silent = unpack(ARGV)
if not redis.call('SET', CHECK, check, 'NX') and redis.call('GET', CHECK) ~= check then return {'foreign'} end
redis.call('SET', BORN, new, 'NX')
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', BEATEN, '-inf', now - silent, 'LIMIT', 0, 100)) do
  redis.call('ZREM', BEATEN, gone)
  redis.call('HDEL', MEMBERS, gone)
end
redis.call('HSET', MEMBERS, replica, beat)
redis.call('ZADD', BEATEN, now, replica)
return {'heard', redis.call('GET', BORN), redis.call('GET', EPOCH) or '0', redis.call('GET', TRIMMED) or '0',
  redis.call('ZRANGEBYSCORE', FORGOTTEN, '(' .. since, '+inf', 'WITHSCORES', 'LIMIT', 0, most)}
