-- A worker died while it held jobs, or its engine failed: which job caused it?
-- - A job that stored progress in that attempt is cleared: what ended the worker came after its last token.
-- - A job held by two such workers is a suspect. Suspects run apart from all others, on any empty worker, at most half
--   as many together as at the last death. So their number halves until one runs alone.
-- - Only a death over a job that ran alone counts against it; too many of those make it a dead letter.
-- - A worker that was told to end, or killed by its own supervisor, blames no job; if one turns out to be alive, its
--   blame is withdrawn (acquit.lua).
local SHARED_DEATHS, MOST_TOGETHER = 2, 32

-- Put a job into the suspects' line. together: how many of them one worker may run, this one included.
local function set_apart(id, score, together)
  redis.call('HSET', state_of .. id, 'alone', together)
  redis.call('ZADD', alone, score, id)
  redis.call('ZADD', jobs, 'XX', FAR_MS, id)
  ring()
end

-- Put a job back in its place in the line, or delay_ms later. together: false if it is no suspect.
local function requeue(id, score, together, now, delay_ms, log)
  redis.call('HDEL', state_of .. id, 'owner')
  redis.call('HSET', state_of .. id, 'log', log)
  redis.call('DEL', running_of .. id)
  redis.call('ZREM', leases, id)
  if delay_ms > 0 then score = now + delay_ms end
  if together then
    set_apart(id, score, together)
  else
    redis.call('ZADD', jobs, 'XX', score, id)
    if delay_ms <= 0 then ring() end
  end
end

-- The jobs a worker holds.
local function held_by(owner)
  local held = {}
  for _, id in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
    if redis.call('HGET', state_of .. id, 'owner') == owner then held[#held + 1] = id end
  end
  return held
end

-- The attempt failed, and no job is to blame.
local function hand_back(id, now, detail)
  local f = redis.call('HMGET', state_of .. id, 'alone', 'score', 'worker', 'attempt', 'log', 'since')
  count('redelivered', 1)
  requeue(id, f[2] or now, f[1], now, 0, logged(f[5], f[6], f[4], f[3], now, 'l', detail))
end

-- suspect: the owner that may turn out to be alive, '' if it is known to have failed; held: how many jobs it held.
-- Returns true if the job has ended.
local function blame(id, suspect, held, most, now, detail, traceback)
  local state = state_of .. id
  local f = redis.call('HMGET', state, 'alone', 'score', 'worker', 'attempt', 'log', 'since', 'together', 'moved')
  if f[8] and f[8] == f[4] then
    redis.call('HDEL', state, 'alone', 'shared')
    hand_back(id, now, detail)
    return false
  end
  local log = logged(f[5], f[6], f[4], f[3], now, 'l', detail)
  local kind = f[1] and f[7] == '1' and 'deaths' or 'shared'
  local deaths = redis.call('HINCRBY', state, kind, 1)
  if suspect ~= '' then redis.call('HSET', state, 'blames:' .. suspect, kind) end
  if kind == 'deaths' and deaths >= most then
    bury(id, {
      ending = 'dead', reason = 'worker_deaths', worker = f[3] or '', traceback = traceback, log = log,
      detail = deaths .. ' workers died or hung while it ran alone' .. (detail and ('; last: ' .. detail) or ''),
    })
    return true
  end
  count('redelivered', 1)
  local together = (f[1] or deaths >= SHARED_DEATHS) and tonumber(f[1] and f[7] or held)
  if together then together = math.max(1, math.min(MOST_TOGETHER, math.floor(together / 2))) end
  requeue(id, f[2] or now, together, now, 0, log)
  return false
end
