-- needs: names adopt finish bury blame cancel
-- Take up to `capacity` sequences' worth of ready jobs: highest priority first, oldest first.
-- A leased job sits in the queue with its lease's end as score, so an expired lease is ready by itself.
-- ARGV owner worker lease_ms capacity max_deaths held_jobs
-- Returns {jobs, cancelled ids of ours, more_are_ready, finish_what_you_hold_first, latest version or ''}
-- Per job: {id, payload, attempt, enqueued_ms, ms to its deadline or '', alone, "i,j,…" committed, {index, progress, …},
--          foreign: its payload is still to be read (settle.lua)}
local owner, worker, lease = ARGV[FIRST], ARGV[FIRST + 1], tonumber(ARGV[FIRST + 2])
local capacity, most = tonumber(ARGV[FIRST + 3]), tonumber(ARGV[FIRST + 4])
local held, MOST_AT_ONCE = tonumber(ARGV[FIRST + 5]), 100
local now, out, more = now_ms(), {}, 0

-- Indices that need no decoding, and the stored progress of the others.
local function so_far(id, state, n, ndone, has_progress)
  local done, progress = {}, {}
  if ndone > 0 or has_progress then
    for index = 0, n - 1 do
      if redis.call('HEXISTS', state, 'd:' .. index) == 1 then
        done[#done + 1] = index
      elseif has_progress then
        local stored = redis.call('GET', progress_of .. id .. ':' .. index)
        if stored then progress[#progress + 1] = index; progress[#progress + 1] = stored end
      end
    end
  end
  return table.concat(done, ','), progress
end

local function gone(id)
  if redis.call('EXISTS', state_of .. id) == 1 then
    bury(id, { ending = 'dead', reason = 'payload_missing', detail = 'its payload key is gone' })
  else
    count('enqueued', 1)
    redis.call('HSET', state_of .. id, 'n', 1, 'call', '?')
    bury(id, { ending = 'dead', reason = 'expired', detail = 'its payload ran out before a worker took it' })
  end
end

-- Returns the number of sequences that it brings; 0 when it cannot be had.
local function take(id)
  local state = state_of .. id
  local payload = redis.call('GET', payload_of .. id)
  if not payload then gone(id) return 0 end
  local f = redis.call('HMGET', state, 'owner', 'n', 'ndone', 'at', 'expires', 'attempt', 'alone', 'p', 'foreign')
  if not f[2] then
    adopt(id, payload, now)
    f = redis.call('HMGET', state, 'owner', 'n', 'ndone', 'at', 'expires', 'attempt', 'alone', 'p', 'foreign')
  end
  if f[5] and now > tonumber(f[5]) then
    bury(id, { ending = 'dead', reason = 'expired', detail = 'not started before its deadline' })
    return 0
  end
  local n, ndone, attempt = tonumber(f[2]), tonumber(f[3] or 0), tonumber(f[6] or 0) + 1
  redis.call('HSET', state, 'owner', owner, 'worker', worker, 'attempt', attempt)
  redis.call('ZADD', jobs, now + lease, id)
  redis.call('SET', running_of .. id, owner, 'PX', lease)
  local done, progress = so_far(id, state, n, ndone, f[8])
  local left = f[5] and math.floor(tonumber(f[5]) - now) or ''
  out[#out + 1] = { id, payload, attempt, tonumber(f[4]), left, f[7] and 1 or 0, done, progress, f[9] and 1 or 0 }
  return n - ndone
end

-- Whether the job can be taken now: a lease that ran out is blamed on its owner, one that still runs is left alone.
local function is_free(id)
  local holder = redis.call('HGET', state_of .. id, 'owner')
  if not holder then return true end
  local left = redis.call('PTTL', running_of .. id)
  if left > 0 then -- arq's Job.abort moves the score of a running job
    redis.call('ZADD', jobs, now + left, id)
    return false
  end
  if holder == owner then return true end
  blame(id, holder, most, now, 'its lease ran out')
  local score = redis.call('ZSCORE', jobs, id)
  return score and tonumber(score) <= now
end

local version = redis.call('GET', latest) or ''
local cancelled = cancel(owner, now)
local first = redis.call('ZRANGEBYSCORE', alone, '-inf', now, 'LIMIT', 0, 1)[1]
if first then
  local turn = redis.call('GET', alone .. ':turn')
  if not turn or turn == owner then
    redis.call('SET', alone .. ':turn', owner, 'PX', lease)
    if held > 0 or capacity <= 0 then return { {}, cancelled, 0, held, version } end
    redis.call('ZREM', alone, first)
    take(first)
    return { out, cancelled, 0, 0, version }
  end
end
if capacity > 0 then
  local limit = math.min(capacity, MOST_AT_ONCE)
  local ready = redis.call('ZRANGEBYSCORE', jobs, '-inf', now, 'LIMIT', 0, limit + 1)
  for k, id in ipairs(ready) do
    if capacity <= 0 or k > limit then more = 1 break end
    if is_free(id) then capacity = capacity - take(id) end
  end
  if more == 1 then ring() end
end
return { out, cancelled, more, 0, version }
