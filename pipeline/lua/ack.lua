-- needs: owns
-- The trainer's ack, after its checkpoint is durable; counts each batch once however often it is repeated.
-- KEYS batches counts owner   ARGV nonce group then per batch: stream_id samples
-- Returns the number of samples counted, -1 when another trainer took over.
if not owns(KEYS[3], ARGV[1]) then return -1 end
local trained, bytes = 0, 0
for i = 3, #ARGV, 2 do
  local entry = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i], 'COUNT', 1)[1]
  if redis.call('XACK', KEYS[1], ARGV[2], ARGV[i]) == 1 then
    redis.call('XDEL', KEYS[1], ARGV[i])
    trained = trained + tonumber(ARGV[i + 1])
    if entry then bytes = bytes + #entry[2][2] end
  end
end
redis.call('HINCRBY', KEYS[2], 'trained', trained)
redis.call('HINCRBY', KEYS[2], 'bytes', -bytes)
return trained
