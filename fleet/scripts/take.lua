-- Takes from a bucket that fills evenly and holds one minute's allowance. It may be overdrawn: a cost may be known only
-- afterwards. Answers {seconds to wait, level}, both as text; with seconds to wait nothing was taken.
-- ARGV: key, allowance a minute, amount, how much must be there (0: nothing)
local key, per_minute, amount, need = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local was = redis.call('HMGET', key, 'level', 'at', 'limit')
local level = per_minute
if was[1] and was[3] == ARGV[2] then
  level = math.min(per_minute, was[1] + math.max(0, now_us - was[2]) * per_minute / 60e6)
end
local missing = math.min(need, per_minute) - level
if need > 0 and missing > 0 then return {tostring(missing * 60 / per_minute), tostring(level)} end
level = level - amount
redis.call('HSET', key, 'level', string.format('%.6f', level), 'at', string.format('%.0f', now_us), 'limit', ARGV[2])
redis.call('PEXPIRE', key, math.ceil((per_minute - level) * 60000 / per_minute) + 1000)
return {'0', tostring(level)}
