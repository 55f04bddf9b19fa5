-- Hand jobs back without blame: the original place in the line, plus a delay.
-- KEYS jobs   ARGV state_prefix owner delay_ms then per job: id attempt
-- Returns the number of jobs handed back.
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local released = 0
for i = 4, #ARGV, 2 do
  local state = ARGV[1] .. ARGV[i]
  local f = redis.call('HMGET', state, 'owner', 'attempt', 'score')
  if f[1] == ARGV[2] and f[2] == ARGV[i + 1] then
    local delay = tonumber(ARGV[3])
    redis.call('HDEL', state, 'owner')
    redis.call('ZADD', KEYS[1], 'XX', delay > 0 and now + delay or tonumber(f[3] or now), ARGV[i])
    released = released + 1
  end
end
return released
