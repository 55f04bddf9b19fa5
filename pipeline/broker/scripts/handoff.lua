-- needs: owns drop
-- A consumer's effect, all or nothing: batch out, drops recorded, results acked and deleted.
-- KEYS results batches counts owner dropped
-- ARGV nonce group reader batch_id batch samples result_bytes num_results num_drops,
--      the result ids, then per drop: reason letter
-- Returns ok | dup | fenced | lost: a result no longer belongs to this reader, nothing was done
if not owns(KEYS[4], ARGV[1]) then return 'fenced' end
if redis.call('HGET', KEYS[3], 'last:' .. KEYS[1]) == ARGV[4] then return 'dup' end
local samples, results, drops = tonumber(ARGV[6]), tonumber(ARGV[8]), tonumber(ARGV[9])
for i = 10, 9 + results do
  local held = redis.call('XPENDING', KEYS[1], ARGV[2], ARGV[i], ARGV[i], 1)[1]
  if not held or held[2] ~= ARGV[3] then return 'lost' end
end
-- First, because they free memory: once a script has written, a full broker lets it continue, so the broker empties.
for i = 10, 9 + results do
  redis.call('XACK', KEYS[1], ARGV[2], ARGV[i])
  redis.call('XDEL', KEYS[1], ARGV[i])
end
redis.call('HSET', KEYS[3], 'last:' .. KEYS[1], ARGV[4])
local bytes = 0 - tonumber(ARGV[7])
if samples > 0 then
  redis.call('XADD', KEYS[2], '*', 'b', ARGV[5])
  redis.call('HINCRBY', KEYS[3], 'accepted', samples)
  bytes = bytes + #ARGV[5]
end
for i = 10 + results, 9 + results + 2 * drops, 2 do
  drop(KEYS[3], KEYS[5], ARGV[i], ARGV[i + 1])
end
redis.call('HINCRBY', KEYS[3], 'bytes', bytes)
return 'ok'
