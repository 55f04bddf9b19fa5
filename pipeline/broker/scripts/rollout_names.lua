-- The arguments every script of agent rollouts gets first (RolloutNames in rollouts.py), and the clock.
local counts, dropped, source, open = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local evaluated, open_evaluated, producer = KEYS[5], KEYS[6], KEYS[7]
local rollout_of, ttl_ms, keep_ms, FIRST = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), 4

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function count(name, by)
  if by ~= 0 then redis.call('HINCRBY', counts, name, by) end
end
