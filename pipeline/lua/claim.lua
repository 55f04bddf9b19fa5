-- Take up to `capacity` sequences' worth of ready jobs: highest priority first, oldest first.
-- A leased job sits in the queue with its lease's end as score, so an expired lease is ready by itself;
-- that another worker still owned it then counts as one death of a worker over it.
-- KEYS jobs counts dlq
-- ARGV payload_prefix state_prefix owner worker lease_ms capacity max_attempts tombstone_ms
-- Returns per job: {id, payload, attempt, enqueued_ms, "i,j,…" committed indices}
local jobs, counts, dlq = KEYS[1], KEYS[2], KEYS[3]
local owner, worker, lease = ARGV[3], ARGV[4], tonumber(ARGV[5])
local capacity, max_attempts, ttl = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local now, out = now_ms(), {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', jobs, '-inf', now, 'LIMIT', 0, capacity)) do
  if capacity <= 0 then break end
  local state, payload_key = ARGV[2] .. id, ARGV[1] .. id
  local f = redis.call('HMGET', state, 'owner', 'deaths', 'expires', 'n', 'ndone', 'at')
  local deaths = tonumber(f[2] or 0)
  if f[1] and f[1] ~= owner then
    deaths = deaths + 1
    redis.call('HSET', state, 'deaths', deaths)
    redis.call('HINCRBY', counts, 'redelivered', 1)
  end
  local payload = redis.call('GET', payload_key)
  if not payload then
    bury(id, state, payload_key, jobs, counts, dlq, ttl, 'payload_missing', 'its payload key is gone', worker)
  elseif deaths >= max_attempts then
    bury(id, state, payload_key, jobs, counts, dlq, ttl, 'worker_deaths',
      deaths .. ' workers died or hung over it', redis.call('HGET', state, 'worker') or '')
  elseif f[3] and now > tonumber(f[3]) then
    bury(id, state, payload_key, jobs, counts, dlq, ttl, 'expired', 'not started before its deadline', worker)
  else
    local attempt = redis.call('HINCRBY', state, 'attempt', 1)
    redis.call('HSET', state, 'owner', owner, 'worker', worker)
    redis.call('ZADD', jobs, now + lease, id)
    local done, n = {}, tonumber(f[4] or 1)
    if tonumber(f[5] or 0) > 0 then
      for index = 0, n - 1 do
        if redis.call('HEXISTS', state, 'd:' .. index) == 1 then done[#done + 1] = index end
      end
    end
    capacity = capacity - (n - #done)
    out[#out + 1] = { id, payload, attempt, tonumber(f[6] or now), table.concat(done, ',') }
  end
end
return out
