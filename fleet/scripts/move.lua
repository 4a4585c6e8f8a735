-- Notes to which replica a session's next turn goes; the claim of any replica ends that.
-- Answers {'moved'} or {'gone'}.
-- ARGV: tenant, member, replica
local tenant, member, replica = unpack(ARGV)
local record = record_of(tenant, member)
if redis.call('EXISTS', record) == 0 then return {'gone'} end
redis.call('HSET', record, 'wanted', replica)
return {'moved'}
