-- Where a job stands in the line. A ready one has a place, given in the order of arrival, so that a clock that steps
-- back holds up nobody. Scores from TIMES on are times, in milliseconds: of leases, of delays, and of arq's own
-- enqueue_job. What comes due is given its place again, or its first one.
local LANE = 1e12 -- places of one priority; whatever has a higher one goes before them
local TIMES, PLACES = 1e12, '(1000000000000' -- a place is below it; any time since 2001 is not
local DUE_AT_ONCE = 100

-- The next place. Behind 1, which arq's Job.abort gives to what it moves.
local function place(priority)
  return redis.call('HINCRBY', counts, 'places', 1) + 1 - priority * LANE
end

-- What is due leaves its time for its place. A lease that ran out is no delay: see expire in claim.lua.
local function come_due(line, now)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', line, TIMES, now, 'LIMIT', 0, DUE_AT_ONCE)) do
    if not redis.call('ZSCORE', leases, id) then
      local home = redis.call('HGET', state_of .. id, 'score')
      local mine = tonumber(home or TIMES)
      if mine >= TIMES then
        mine = place(0)
        if home then redis.call('HSET', state_of .. id, 'score', mine) end
      end
      redis.call('ZADD', line, 'XX', mine, id)
    end
  end
end
