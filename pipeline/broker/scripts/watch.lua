-- What rings no bell (jobs of arq's own enqueue_job, deferred ones, leases that ran out) is looked for by one worker
-- with room, at its full rate; the idle others look when its claim to that would run out. An idle one is preferred:
-- the claim of a busy one is marked, and taken over.
local BUSY = 'busy:'

-- A key that is there while a worker that was told to end may still hold jobs.
local function leaving(owner) return claims_of .. owner .. ':leaving' end

-- Somebody else is to look: this worker has no room, or is gone.
local function stand_down(owner)
  local watching = redis.call('GET', watch)
  if watching == owner or watching == BUSY .. owner then
    redis.call('DEL', watch)
    watching = false
  end
  if not watching then ring() end
end

-- Milliseconds until this worker has to look again; 0: at its usual rate.
local function look_again(owner, is_busy, claim_ms)
  local watching = redis.call('GET', watch)
  local mine = watching == owner or watching == BUSY .. owner
  if is_busy then
    if mine or not watching then redis.call('SET', watch, BUSY .. owner, 'PX', claim_ms) end
    if watching == owner then ring() end
    return 0
  end
  if watching and not mine and string.sub(watching, 1, #BUSY) ~= BUSY then
    return math.max(1, redis.call('PTTL', watch))
  end
  redis.call('SET', watch, owner, 'PX', claim_ms)
  return 0
end
