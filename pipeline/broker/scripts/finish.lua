-- End a job: only arq's result key is left, which keeps a repeat from being enqueued.
local surely_empty = {} -- keys the script has checked, so nothing is removed from them job by job

local function look_for_empty(...)
  for _, key in ipairs({ ... }) do surely_empty[key] = redis.call('ZCARD', key) == 0 end
end

-- answer: arq's result, encoded; kept: milliseconds, 0 = not at all, -1 = forever, nil = as the worker says
local function finish(id, n, has_progress, answer, kept)
  if has_progress then
    for index = 0, n - 1 do redis.call('DEL', progress_of .. id .. ':' .. index) end
  end
  redis.call('DEL', state_of .. id)
  if in_reach(id) then redis.call('DEL', payload_of .. id, running_of .. id) else kept = 0 end
  for _, line in ipairs({ jobs, leases, alone, aborts }) do
    if not surely_empty[line] then redis.call('ZREM', line, id) end
  end
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
