-- One worker with room watches, at its full rate, for what rings no bell (jobs of arq's own enqueue_job, deferred
-- ones, expired leases); idle others look when its claim to that would expire. An idle one is preferred: a busy
-- one's claim is marked, and taken over: it rings for that if somebody sleeps, or it would wake itself.
local BUSY = 'busy:'
local asleep = watch .. ':asleep' -- exists while an idle worker leaves the watch to another

-- A key that exists while a worker that was told to end may still hold jobs.
local function leaving(owner) return claims_of .. owner .. ':leaving' end

local function is_watching(owner)
  local watching = redis.call('GET', watch)
  return watching == owner or watching == BUSY .. owner
end

-- Another worker should look: this one has no room, or is gone.
local function stand_down(owner)
  redis.call('DEL', claims_of .. owner .. ':room') -- see prefix.lua
  local watching = redis.call('GET', watch)
  if watching == owner or watching == BUSY .. owner then
    redis.call('DEL', watch)
    watching = false
  end
  if not watching then ring() end
end

-- Milliseconds until this worker must look again; 0: at its usual rate.
local function look_again(owner, is_busy, claim_ms)
  local watching = redis.call('GET', watch)
  local mine = watching == owner or watching == BUSY .. owner
  if is_busy then
    if mine or not watching then redis.call('SET', watch, BUSY .. owner, 'PX', claim_ms) end
    if watching == owner and redis.call('EXISTS', asleep) == 1 then ring() end
    return 0
  end
  if watching and not mine and string.sub(watching, 1, #BUSY) ~= BUSY then
    local sleeps_ms = math.max(1, redis.call('PTTL', watch))
    if redis.call('PTTL', asleep) < sleeps_ms then redis.call('SET', asleep, 1, 'PX', sleeps_ms) end
    return sleeps_ms
  end
  redis.call('SET', watch, owner, 'PX', claim_ms)
  return 0
end
