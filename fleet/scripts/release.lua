-- Lets go of a session, if it is still claimed under this epoch. Answers {'released'}, {'fenced'} or {'flushed'}.
-- ARGV: born, epoch, tenant, member
local born, epoch, tenant, member = unpack(ARGV)
if redis.call('GET', BORN) ~= born then return {'flushed'} end
local record = record_of(tenant, member)
if redis.call('HGET', record, 'epoch') ~= epoch then return {'fenced'} end
redis.call('HSET', record, 'home', '', 'boot', '')
redis.call('HDEL', record, 'runs')
return {'released'}
