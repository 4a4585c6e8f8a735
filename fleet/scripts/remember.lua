-- Writes deletions again after a flush, and deletes what has come back since. Answers {'remembered'} or {'flushed'}.
-- ARGV: born, then a tenant, a name and the epoch of its deletion in turn
if redis.call('GET', BORN) ~= ARGV[1] then return {'flushed'} end
for place = 2, #ARGV, 3 do
  local tenant, name, epoch = ARGV[place], ARGV[place + 1], ARGV[place + 2]
  redis.call('ZADD', FORGOTTEN, 'GT', epoch, name)
  for _, member in ipairs(redis.call('SMEMBERS', names_of(name))) do
    local begun = redis.call('HGET', record_of(tenant, member), 'begun')
    if not begun or tonumber(begun) < tonumber(epoch) then drop(tenant, member) end
  end
end
return {'remembered'}
