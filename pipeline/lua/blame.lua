-- A worker died over a job, or its engine failed. Jobs that were on a worker when it died twice run alone from then
-- on; only a death over a job that ran alone counts against it, and too many of those make it a dead letter.
-- A worker that turns out to be alive takes its blame back (acquit.lua).
local FAR_MS = 4e12 -- in the year 2096: not ready by itself; the line of those that run alone knows its place
local SHARED_DEATHS = 2

-- Waits in the line of those that run alone.
local function set_apart(id, score)
  redis.call('HSET', state_of .. id, 'alone', 1)
  redis.call('ZADD', alone, score, id)
  redis.call('ZADD', jobs, 'XX', FAR_MS, id)
  ring()
end

-- Back to its place in the line; later by delay_ms.
local function requeue(id, score, apart, now, delay_ms, log)
  redis.call('HDEL', state_of .. id, 'owner')
  redis.call('HSET', state_of .. id, 'log', log)
  redis.call('DEL', running_of .. id)
  redis.call('ZREM', leases, id)
  if delay_ms > 0 then score = now + delay_ms end
  if apart then
    set_apart(id, score)
  else
    redis.call('ZADD', jobs, 'XX', score, id)
    if delay_ms <= 0 then ring() end
  end
end

-- suspect: the owner that may turn out to be alive, '' when it is known to have failed.
-- Returns true when the job is over.
local function blame(id, suspect, most, now, detail, traceback)
  local state = state_of .. id
  local f = redis.call('HMGET', state, 'alone', 'score', 'worker', 'attempt', 'log', 'since')
  local log = logged(f[5], f[6], f[4], f[3], now, 'l', detail)
  local kind = f[1] and 'deaths' or 'shared'
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
  requeue(id, f[2] or now, f[1] or deaths >= SHARED_DEATHS, now, 0, log)
  return false
end
