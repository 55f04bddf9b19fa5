-- A consumer's effect, whole or not at all: batch out, drops recorded, results acked and deleted.
-- KEYS results batches counts owner dlq
-- ARGV nonce group batch_id batch samples num_results num_drops, the result ids, then per drop: reason letter
-- Returns ok | dup | fenced
if not owns(KEYS[4], ARGV[1]) then return 'fenced' end
if redis.call('HGET', KEYS[3], 'last:' .. KEYS[1]) == ARGV[3] then return 'dup' end
redis.call('HSET', KEYS[3], 'last:' .. KEYS[1], ARGV[3])
if tonumber(ARGV[5]) > 0 then
  redis.call('XADD', KEYS[2], '*', 'b', ARGV[4])
  redis.call('HINCRBY', KEYS[3], 'accepted', ARGV[5])
end
local at = 8
for i = at, at + tonumber(ARGV[6]) - 1 do
  redis.call('XACK', KEYS[1], ARGV[2], ARGV[i])
  redis.call('XDEL', KEYS[1], ARGV[i])
end
at = at + tonumber(ARGV[6])
for i = at, at + tonumber(ARGV[7]) * 2 - 1, 2 do
  redis.call('XADD', KEYS[5], '*', 'd', ARGV[i + 1])
  redis.call('HINCRBY', KEYS[3], 'dropped', 1)
  redis.call('HINCRBY', KEYS[3], 'dropped:' .. ARGV[i], 1)
end
return 'ok'
