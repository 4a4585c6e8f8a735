-- Makes leases of places last for longer; one that a flush has lost is there again. Answers {'renewed'}.
-- ARGV: milliseconds of a lease, then a key, a lease and the places that it takes in turn
local lives = tonumber(ARGV[1])
for place = 2, #ARGV, 3 do
  local left = redis.call('PTTL', ARGV[place])
  redis.call('ZADD', ARGV[place], now + lives, ARGV[place + 2] .. ':' .. ARGV[place + 1])
  live_at_least(ARGV[place], lives, left)
end
return {'renewed'}
