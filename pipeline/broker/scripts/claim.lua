-- needs: names version log line adopt finish reply bury blame cancel watch prefix
-- Claim ready jobs worth up to `capacity` sequences: highest priority first, then in the order of their places.
-- A leased job stays in the queue, scored by the end of its lease; first, expired ones go back to their old places.
-- ARGV owner worker lease_ms capacity max_deaths held_jobs call_number (repeating the last call returns the same jobs)
--      version known to the owner, watch_ms (0: it doesn't look again by itself; see watch.lua),
--      prefix_wait_ms (0: no job is left to the worker that has its beginning; see prefix.lua), quota (sequences of this
--      queue that all workers may hold at once; 0: any number), looks (1: say without room too whether jobs are ready)
-- Returns {jobs, our cancelled ids, more_are_ready, finish_what_you_hold_first, latest version or '', jobs that ended,
--          ms until it has to look again}
-- Per job: {id, payload, attempt, enqueued_ms, ms to its deadline or '', alone, "i,j,…" committed, {index, progress, …},
--          foreign: its payload must still be read (settle.lua), tries used up}
local owner, worker, lease = ARGV[FIRST], ARGV[FIRST + 1], tonumber(ARGV[FIRST + 2])
local capacity, most = tonumber(ARGV[FIRST + 3]), tonumber(ARGV[FIRST + 4])
local beyond_quota = 0 -- of that capacity
local held, MOST_AT_ONCE = tonumber(ARGV[FIRST + 5]), 100
local call, now, out, given, more, over = ARGV[FIRST + 6], now_ms(), {}, {}, 0, 0
local watch_ms, prefix_wait_ms = tonumber(ARGV[FIRST + 8]), tonumber(ARGV[FIRST + 9])
local quota, looks = tonumber(ARGV[FIRST + 10]), ARGV[FIRST + 11] == '1'
local has_turns = looks -- it may have no room now because other queues have their turn; that is no reason to ring
local last_call = claims_of .. owner

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
  if redis.call('EXISTS', answer_of .. id) == 1 then -- arq's Job.abort came too late and put it back
    redis.call('ZREM', jobs, id)
    return
  end
  over = over + 1
  if redis.call('EXISTS', state_of .. id) == 1 then
    bury(id, { ending = 'dead', reason = 'payload_missing', detail = 'its payload key is gone' })
  else
    adopt_empty(id)
    bury(id, { ending = 'dead', reason = 'expired', detail = 'its payload ran out before a worker took it' })
  end
end

local function facts(id)
  return redis.call('HMGET', state_of .. id, 'owner', 'n', 'ndone', 'at', 'expires', 'attempt', 'alone', 'p', 'foreign',
    'tries', 'prefix')
end

local function give(id, content, attempt, f)
  local done, progress = so_far(id, state_of .. id, tonumber(f[2]), tonumber(f[3] or 0), f[8])
  local left = f[5] and math.floor(tonumber(f[5]) - now) or ''
  out[#out + 1] =
    { id, content, attempt, tonumber(f[4]), left, f[7] and 1 or 0, done, progress, f[9] and 1 or 0, tonumber(f[10] or 0) }
  given[#given + 1] = id
end

-- Only its id can be read or removed.
local function stray(id)
  adopt_empty(id)
  bury(id, { ending = 'dead', reason = 'malformed_id', detail = 'on a cluster the ids of this run begin with ' .. tag })
  over = over + 1
  return 0
end

-- Returns the number of its sequences; 0 if it can't be claimed. together: how many a suspect runs with.
local function take(id, together)
  if not in_reach(id) then return stray(id) end
  local content = payload(id)
  if not content then gone(id) return 0 end
  local f = facts(id)
  if not f[2] then
    adopt(id, content, now)
    f = facts(id)
  end
  if f[5] and now > tonumber(f[5]) then
    bury(id, { ending = 'dead', reason = 'expired', detail = 'its deadline passed before a worker took it' })
    over = over + 1
    return 0
  end
  local attempt = tonumber(f[6] or 0) + 1
  redis.call('HSET', state_of .. id, 'owner', owner, 'worker', worker, 'attempt', attempt,
    'since', math.floor(now))
  if f[7] then redis.call('HSET', state_of .. id, 'together', together) end
  redis.call('ZADD', jobs, now + lease, id)
  redis.call('ZADD', leases, now + lease, id)
  redis.call('SET', running_of .. id, owner, 'PX', lease)
  if f[11] then hold(f[11], owner) end
  give(id, content, attempt, f)
  return tonumber(f[2]) - tonumber(f[3] or 0)
end

local num_held_by = {} -- owner → jobs whose leases expired

-- An expired lease: its owner is blamed, and the job goes back into the line.
local function expire(id)
  local f = redis.call('HMGET', state_of .. id, 'owner', 'score', 'alone', 'attempt', 'log', 'since')
  if not f[1] then
    redis.call('ZREM', leases, id)
  elseif f[1] == owner then
    requeue(id, f[2] or now, f[3], now, 0, logged(f[5], f[6], f[4], worker, now, 'h', 'its lease ran out'))
  elseif redis.call('EXISTS', leaving(f[1])) == 1 then
    hand_back(id, now, 'its lease ran out after its worker was told to end')
  else
    num_held_by[f[1]] = num_held_by[f[1]] or #held_by(f[1])
    blame(id, f[1], num_held_by[f[1]], most, now, 'its lease ran out')
  end
end

local some_apart = true

-- Whether the job can be taken now. arq's Job.abort moves the score of any job; its real place is stored elsewhere.
local function is_free(id)
  local ends = redis.call('ZSCORE', leases, id)
  local place = ends or (some_apart and redis.call('ZSCORE', alone, id) and FAR_MS)
  if place then redis.call('ZADD', jobs, place, id) end
  return not place
end

-- The last call's result, in case its answer was lost. Returns whether this is that call again.
local function give_again()
  local last = redis.call('LRANGE', last_call, 0, -1)
  if last[1] ~= call then return false end
  for k = 2, #last do
    local id = last[k]
    local f, content = facts(id), payload(id)
    if content and f[1] == owner then give(id, content, tonumber(f[6]), f) end
  end
  return true
end

local function remember()
  redis.call('DEL', last_call)
  if #given == 0 then return end
  redis.call('RPUSH', last_call, call, unpack(given))
  redis.call('PEXPIRE', last_call, lease)
end

-- Suspects run apart, so a worker that holds anything finishes it first; no more workers do so than are needed.
-- Returns the answer, nil if the worker continues with other jobs.
local function suspects()
  local waiting = redis.call('ZRANGEBYSCORE', alone, '-inf', PLACES, 'LIMIT', 0, MOST_AT_ONCE)
  if #waiting == 0 then return nil end
  local turns, chosen, sequences, together = alone .. ':turns', {}, 0, nil
  for _, id in ipairs(waiting) do
    local f = redis.call('HMGET', state_of .. id, 'alone', 'n', 'ndone')
    local most_together = tonumber(f[1] or 1)
    together = together or most_together
    if most_together >= together and #chosen < together and sequences < capacity then
      chosen[#chosen + 1] = id
      sequences = sequences + tonumber(f[2] or 1) - tonumber(f[3] or 0)
    end
  end
  redis.call('DEL', room_of(owner))
  if held > 0 then
    redis.call('ZREMRANGEBYSCORE', turns, '-inf', now)
    local is_needed = redis.call('ZCARD', turns) < math.ceil(#waiting / together)
    if not is_needed and not redis.call('ZSCORE', turns, owner) then return nil end
    redis.call('ZADD', turns, now + lease, owner)
    redis.call('PEXPIRE', turns, lease) -- the last one may die with its turn, and no suspect is left
    ring()
    return {}, 1
  end
  if capacity <= 0 then return nil end
  redis.call('ZREM', turns, owner)
  for _, id in ipairs(chosen) do
    redis.call('ZREM', alone, id)
    take(id, #chosen)
  end
  ring() -- for what this worker leaves to others
  remember()
  return out, 0
end

-- Sequences that workers hold now; as many leases as the quota has sequences are read at most.
local function leased()
  local found = 0
  for _, id in ipairs(redis.call('ZRANGE', leases, 0, quota - 1)) do
    local f = redis.call('HMGET', state_of .. id, 'n', 'ndone')
    found = found + tonumber(f[1] or 1) - tonumber(f[2] or 0)
  end
  return found
end

local version = newest_version(latest)
version = version >= 0 and tostring(version) or ''
if version ~= ARGV[FIRST + 7] then ring() end -- a worker that learns of a new one wakes the next sleeping one
local cancelled, ended = cancel(owner, now)
over = over + ended

local function answer_with(jobs_given, finish_first)
  local again = 0
  if capacity + beyond_quota <= 0 then
    if not has_turns or is_watching(owner) then stand_down(owner) end
  elseif watch_ms > 0 then
    again = look_again(owner, held + #given > 0, watch_ms)
  end
  return { jobs_given, cancelled, more, finish_first, version, over, again }
end

if give_again() then return answer_with(out, 0) end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, MOST_AT_ONCE)) do expire(id) end
come_due(jobs, now)
come_due(alone, now)
if quota > 0 and (capacity > 0 or looks) then
  local left = quota - leased()
  beyond_quota = math.max(0, capacity - left)
  capacity, looks = capacity - beyond_quota, looks and left > 0
end
local apart, finish_first = suspects()
if apart then return answer_with(apart, finish_first) end
if looks and capacity <= 0 and redis.call('ZCOUNT', jobs, '-inf', PLACES) > 0 then more = 1 end
if capacity > 0 then
  some_apart = redis.call('ZCARD', alone) > 0
  local limit = math.min(capacity, MOST_AT_ONCE)
  for k, id in ipairs(by_prefix(owner, limit, prefix_wait_ms, now)) do
    if capacity <= 0 or k > limit then more = 1 break end
    if is_free(id) then capacity = capacity - take(id) end
  end
  if more == 1 then ring() end
  remember()
  if capacity > 0 and redis.call('EXISTS', has_prefixes(owner)) == 1 then
    redis.call('SET', room_of(owner), 1, 'PX', lease)
  end
end
return answer_with(out, 0)
