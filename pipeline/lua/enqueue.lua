-- Admit jobs in order until the credit is used up.
-- KEYS jobs counts latest source
-- ARGV payload_prefix state_prefix max_in_flight samples_per_version max_staleness
--      then per job: id payload n priority stream deadline_ms(0 = none) cursor('' = none)
-- Returns per job: enqueued | duplicate | done | over_credit
local jobs, counts, latest, source = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local max_in_flight, per_version, staleness = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local c = redis.call('HMGET', counts, 'enqueued', 'trained', 'dead', 'dropped')
local enqueued, trained = tonumber(c[1] or 0), tonumber(c[2] or 0)
local lost = tonumber(c[3] or 0) + tonumber(c[4] or 0)
-- Batches may run over samples_per_version (groups stay whole): what was trained counts as it is.
local so_far = math.max(tonumber(redis.call('GET', latest) or 0) * per_version, trained)
local ahead = (staleness + 1) * per_version + so_far
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local out, full = {}, false
for i = 6, #ARGV, 7 do
  local id, payload, n = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  local state, outcome = ARGV[2] .. id, nil
  if full then
    outcome = 'over_credit'
  elseif redis.call('HGET', state, 'state') == 'done' then
    outcome = 'done'
  elseif redis.call('EXISTS', state, ARGV[1] .. id) > 0 then
    outcome = 'duplicate'
  elseif enqueued + n - trained - lost > max_in_flight or enqueued + n - lost > ahead then
    outcome, full = 'over_credit', true
  else
    local score = now - tonumber(ARGV[i + 3]) * 1e12
    local deadline = tonumber(ARGV[i + 5])
    redis.call('SET', ARGV[1] .. id, payload)
    redis.call('HSET', state, 'n', n, 'score', score, 'at', now, 'stream', ARGV[i + 4], 'ndone', 0, 'attempt', 0)
    if deadline > 0 then redis.call('HSET', state, 'expires', now + deadline) end
    redis.call('ZADD', jobs, score, id)
    redis.call('HINCRBY', counts, 'enqueued', n)
    enqueued, outcome = enqueued + n, 'enqueued'
  end
  if outcome ~= 'over_credit' and ARGV[i + 6] ~= '' then
    redis.call('HSET', source, 'cursor', ARGV[i + 6])
  end
  out[#out + 1] = outcome
end
return out
