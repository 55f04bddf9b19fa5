-- Extend the leases that this attempt still holds.
-- KEYS jobs   ARGV state_prefix owner lease_ms then per job: id attempt
-- Returns the ids that are lost.
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local lost = {}
for i = 4, #ARGV, 2 do
  local f = redis.call('HMGET', ARGV[1] .. ARGV[i], 'owner', 'attempt')
  if f[1] == ARGV[2] and f[2] == ARGV[i + 1] then
    redis.call('ZADD', KEYS[1], 'XX', now + tonumber(ARGV[3]), ARGV[i])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
