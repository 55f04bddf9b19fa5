-- A job's place in the line. Ready jobs get places in the order of arrival, so a clock that steps back delays none.
-- Scores from TIMES on are times in milliseconds: of leases, of delays, and of arq's own enqueue_job. A job that comes
-- due gets its old place back, or its first one, by its priority. That of a foreign job is known once it has been read
-- (settle.lua), and counts from its next attempt on.
local LANE = 1e12 -- places of one priority; all jobs with a higher one go first
local TIMES, PLACES = 1e12, '(1000000000000' -- places are below it; any time since 2001 is above
local DUE_AT_ONCE = 100

-- A place of priority 0 among those of this one.
local function in_lane(priority, place)
  return place - priority * LANE
end

-- The next place. After 1, the score that arq's Job.abort gives.
local function place(priority)
  return in_lane(priority, redis.call('HINCRBY', counts, 'places', 1) + 1)
end

-- Move jobs that are due from their time to their place. An expired lease isn't a delay: see expire in claim.lua.
local function come_due(line, now)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', line, TIMES, now, 'LIMIT', 0, DUE_AT_ONCE)) do
    if not redis.call('ZSCORE', leases, id) then
      local home, priority = unpack(redis.call('HMGET', state_of .. id, 'score', 'priority'))
      local mine = tonumber(home or TIMES)
      if mine >= TIMES then
        mine = place(tonumber(priority or 0))
        if home then redis.call('HSET', state_of .. id, 'score', mine) end
      end
      redis.call('ZADD', line, 'XX', mine, id)
    end
  end
end
