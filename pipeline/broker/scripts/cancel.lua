-- arq's Job.abort: the id is in arq's own set, which all queues of a server share.
-- Ends the named jobs that no other worker is running. Returns the ids of those that `owner` held, and the number of
-- others. An abort stays for as long as its job waits anywhere, and of a job that doesn't for an hour.
local MOST, OLD_MS = 1000, 3600 * 1000 -- MOST: newer ones, and as many older ones, at one look

local function ended_here(id)
  local readable, result = pcall(cmsgpack.unpack, redis.call('GET', answer_of .. id) or '')
  return readable and type(result) == 'table' and result.q == jobs
end

local function cancel(owner, now)
  local held, unstarted = {}, 0

  local function heed(id)
    if redis.call('EXISTS', answer_of .. id) == 1 then
      -- The abort came too late and put the id back. An id of another run is left to that run's workers.
      if redis.call('ZREM', jobs, id) == 1 or ended_here(id) then redis.call('ZREM', aborts, id) end
    elseif redis.call('ZSCORE', jobs, id) then
      local holder = redis.call('HGET', state_of .. id, 'owner')
      if not holder or holder == owner or tonumber(redis.call('ZSCORE', leases, id) or 0) <= now then
        local found = payload(id)
        if redis.call('EXISTS', state_of .. id) == 0 then
          if found then adopt(id, found, now) else adopt_empty(id) end
        end
        bury(id, { ending = 'dropped', reason = 'cancelled', detail = 'aborted by its caller' })
        if holder == owner then held[#held + 1] = id else unstarted = unstarted + 1 end
      end
    end
  end

  if redis.call('ZCARD', aborts) == 0 then return held, 0 end
  local old = string.format('%.0f', now - OLD_MS)
  for _, id in ipairs(redis.call('ZREVRANGEBYSCORE', aborts, '+inf', '(' .. old, 'LIMIT', 0, MOST)) do heed(id) end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', aborts, '-inf', old, 'LIMIT', 0, MOST)) do
    heed(id)
    -- With a payload it may be in another queue, of which this one knows nothing.
    if redis.call('EXISTS', payload_of .. id) == 0 and not redis.call('ZSCORE', jobs, id) then
      redis.call('ZREM', aborts, id)
    end
  end
  return held, unstarted
end
