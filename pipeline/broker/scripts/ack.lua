-- needs: owns drop
-- The trainer's ack, after its checkpoint is durable; counts each batch once, even if repeated.
-- Samples that the trainer dropped aren't trained, and no longer belong to a batch.
-- KEYS batches counts owner dropped
-- ARGV nonce group stepped stepped_bytes (in steps without an ack, after this one)
--      then per batch: stream_id samples num_drops, then per drop: reason letter
-- Returns the number of samples counted as trained, -1 if another trainer took over.
if not owns(KEYS[3], ARGV[1]) then return -1 end
local trained, lost, bytes, i = 0, 0, 0, 5
while i <= #ARGV do
  local drops = tonumber(ARGV[i + 2])
  local entry = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i], 'COUNT', 1)[1]
  if redis.call('XACK', KEYS[1], ARGV[2], ARGV[i]) == 1 then
    redis.call('XDEL', KEYS[1], ARGV[i])
    trained = trained + tonumber(ARGV[i + 1]) - drops
    if entry then bytes = bytes - #entry[2][2] end
    for k = i + 3, i + 1 + 2 * drops, 2 do drop(KEYS[2], KEYS[4], ARGV[k], ARGV[k + 1]) end
    lost = lost + drops
  end
  i = i + 3 + 2 * drops
end
redis.call('HINCRBY', KEYS[2], 'trained', trained)
redis.call('HINCRBY', KEYS[2], 'bytes', bytes)
redis.call('HSET', KEYS[2], 'stepped', ARGV[3], 'stepped_bytes', ARGV[4])
if lost > 0 then
  redis.call('HINCRBY', KEYS[2], 'accepted', 0 - lost)
  redis.call('HINCRBY', KEYS[2], 'withdrawn', lost)
end
return trained
