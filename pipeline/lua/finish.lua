-- The end of a job: nothing of it is left but arq's result key, which keeps a repeat from being enqueued.

local function forget_progress(id, state, n)
  if redis.call('HEXISTS', state, 'p') == 0 then return end
  for index = 0, n - 1 do redis.call('DEL', progress_of .. id .. ':' .. index) end
end

-- answer: arq's result, encoded; kept: milliseconds, 0 = not at all, -1 = for ever, nil = as the worker says
local function finish(id, n, answer, kept)
  local state = state_of .. id
  forget_progress(id, state, n)
  redis.call('DEL', payload_of .. id, state, running_of .. id)
  redis.call('ZREM', jobs, id)
  redis.call('ZREM', leases, id)
  redis.call('ZREM', alone, id)
  redis.call('ZREM', aborts, id)
  kept = kept or keep_ms
  if kept > 0 then
    redis.call('SET', answer_of .. id, answer, 'PX', kept)
  elseif kept < 0 then
    redis.call('SET', answer_of .. id, answer)
  end
end

local function answer(id, call, attempt, at, now, success, result)
  return cmsgpack.pack({
    t = attempt, f = call or 'decode', a = {}, k = {}, et = math.floor(at), s = success, r = result,
    st = math.floor(at), ft = math.floor(now), q = jobs, id = id,
  })
end
