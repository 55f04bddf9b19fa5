-- Publish finished sequences, each once, only by the attempt that holds the job.
-- KEYS jobs counts
-- ARGV payload_prefix state_prefix owner tombstone_ms then per sequence: id index n attempt stream tokens result
-- Returns per sequence: ok | dup | fenced
local jobs, counts = KEYS[1], KEYS[2]
local out = {}
for i = 5, #ARGV, 7 do
  local id, index, n = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  local state = ARGV[2] .. id
  local f = redis.call('HMGET', state, 'owner', 'attempt', 'state', 'd:' .. index)
  if f[3] == 'done' or f[4] then
    out[#out + 1] = 'dup'
  elseif f[1] ~= ARGV[3] or f[2] ~= ARGV[i + 3] then
    out[#out + 1] = 'fenced'
  else
    redis.call('XADD', ARGV[i + 4], '*', 'r', ARGV[i + 6], 'g', id, 'i', index, 'n', n)
    redis.call('HSET', state, 'd:' .. index, 1)
    redis.call('HINCRBY', counts, 'committed', 1)
    redis.call('HINCRBY', counts, 'tokens', ARGV[i + 5])
    if redis.call('HINCRBY', state, 'ndone', 1) >= n then
      finish(state, ARGV[1] .. id, jobs, id, tonumber(ARGV[4]))
    end
    out[#out + 1] = 'ok'
  end
end
return out
