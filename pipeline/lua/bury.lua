-- Shared by claim and fail: end every uncommitted sequence of a job as dead, and finish the job.
-- Each missing index leaves a tombstone in the result stream, so that its group completes.
local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function finish(state, payload_key, jobs, id, ttl_ms)
  redis.call('DEL', payload_key, state)
  redis.call('ZREM', jobs, id)
  redis.call('HSET', state, 'state', 'done')
  redis.call('PEXPIRE', state, ttl_ms)
end

local function bury(id, state, payload_key, jobs, counts, dlq, ttl_ms, reason, detail, worker)
  local f = redis.call('HMGET', state, 'n', 'attempt', 'stream')
  local n = tonumber(f[1] or '1')
  local payload = redis.call('GET', payload_key) or ''
  local buried = 0
  for index = 0, n - 1 do
    if redis.call('HEXISTS', state, 'd:' .. index) == 0 then
      local letter = cmsgpack.pack({
        kind = 'dead_letter', schema = 1, seq_id = id .. ':' .. index, reason = reason, state = 'dead',
        detail = detail, attempts = tonumber(f[2] or '0'), worker = worker, at = now_ms() / 1000,
      })
      redis.call('XADD', dlq, '*', 'd', letter, 'p', buried == 0 and payload or '')  -- once per job: it may be large
      if f[3] then redis.call('XADD', f[3], '*', 'd', letter, 'g', id, 'i', index, 'n', n) end
      buried = buried + 1
    end
  end
  redis.call('HINCRBY', counts, 'dead', buried)
  redis.call('HINCRBY', counts, 'dead:' .. reason, buried)
  finish(state, payload_key, jobs, id, ttl_ms)
  return buried
end
