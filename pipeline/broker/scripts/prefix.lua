-- Which worker has the beginning of a job's prompt cached: the earlier turns of its rollout, or a prompt of a caller.
-- A job's `prefix` has names, the longest beginning first; `prefix_of .. name` is the worker that took such a job last.
-- - A worker takes what it has the beginning of before other jobs of that priority, except for those that have waited
--   for OVERTAKEN times `wait_ms`.
-- - A turn of a rollout is left to its worker while that has room, for `wait_ms` after it was enqueued. So a worker that
--   is full, ended, or silent for a lease, holds nothing up; one that doesn't come for it holds it up for `wait_ms`.
local PREFIX_KEPT_MS, OVERTAKEN, ROLLOUT = 600 * 1000, 10, 'r:'
local LOOK_AHEAD = 64 -- jobs beyond its room that a worker may take first

-- A key that exists while a worker that has prefixes had room at its last claim.
local function room_of(owner) return claims_of .. owner .. ':room' end

-- A key that exists while a worker has prefixes; of ANY: while some worker has.
local ANY = ''
local function has_prefixes(owner) return claims_of .. owner .. ':prefixes' end

-- The worker that has the longest of these prefixes, nil if none has one.
local function holder_of(prefixes)
  for name in string.gmatch(prefixes or '', '%S+') do
    local holder = redis.call('GET', prefix_of .. name)
    if holder then return holder end
  end
end

-- The worker takes a job with these prefixes.
local function hold(prefixes, owner)
  for name in string.gmatch(prefixes, '%S+') do redis.call('SET', prefix_of .. name, owner, 'PX', PREFIX_KEPT_MS) end
  for _, whose in ipairs({ owner, ANY }) do redis.call('SET', has_prefixes(whose), 1, 'PX', PREFIX_KEPT_MS) end
end

-- Wake the worker that has the prefixes, if it has room; false: another one should be woken.
local function call_holder(prefixes)
  local holder = holder_of(prefixes)
  if not holder or redis.call('EXISTS', room_of(holder)) == 0 then return false end
  local bell = wake .. ':' .. holder
  if redis.call('LLEN', bell) == 0 then redis.call('RPUSH', bell, 1) end
  redis.call('PEXPIRE', bell, PREFIX_KEPT_MS)
  return true
end

-- The ids of ready jobs in the order in which this worker should take them, without those that are left to others.
-- Where there is nothing to prefer or to leave, no job is looked at, and there is at most one more than `most`.
local function by_prefix(owner, most, wait_ms, now)
  local mine = redis.call('EXISTS', has_prefixes(owner)) == 1
  if not mine and (wait_ms == 0 or redis.call('EXISTS', has_prefixes(ANY)) == 0) then
    return redis.call('ZRANGEBYSCORE', jobs, '-inf', PLACES, 'LIMIT', 0, most + 1)
  end
  local ready = redis.call('ZRANGEBYSCORE', jobs, '-inf', PLACES, 'WITHSCORES', 'LIMIT', 0, most + 1 + LOOK_AHEAD)
  local out, line, lane, has_room = {}, {}, nil, {}

  local function is_left(holder, prefixes, age)
    if not holder or holder == owner or age < 0 or age >= wait_ms then return false end
    if string.sub(prefixes, 1, #ROLLOUT) ~= ROLLOUT then return false end
    if has_room[holder] == nil then has_room[holder] = redis.call('EXISTS', room_of(holder)) == 1 end
    return has_room[holder]
  end

  local function end_lane()
    for class = 1, 3 do
      for _, id in ipairs(line[class] or {}) do out[#out + 1] = id end
    end
    line = {}
  end

  for k = 1, #ready, 2 do
    local id, its_lane = ready[k], math.floor(tonumber(ready[k + 1]) / LANE)
    if its_lane ~= lane then
      end_lane()
      lane = its_lane
    end
    if #out > most or (not mine and #out + #(line[3] or {}) > most) then break end
    local f = redis.call('HMGET', state_of .. id, 'prefix', 'at')
    local age = f[2] and now - tonumber(f[2]) or 0
    local holder = f[1] and holder_of(f[1])
    if not is_left(holder, f[1], age) then
      local class = 3
      if mine and age >= OVERTAKEN * wait_ms then class = 1 elseif mine and holder == owner then class = 2 end
      line[class] = line[class] or {}
      table.insert(line[class], id)
    end
  end
  end_lane()
  return out
end
