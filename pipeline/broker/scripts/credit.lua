-- How far enqueueing may run ahead; every key is an argument.

-- Current usage, and the limits (max_in_flight 0 = none); see admits.
local function credit_of(counts, max_in_flight, max_bytes, per_version, staleness)
  local c = redis.call('HMGET', counts, 'enqueued', 'trained', 'dead', 'dropped', 'bytes', 'stepped', 'stepped_bytes')
  -- What is in a step no longer waits for the trainer, though its ack waits for a checkpoint.
  local trained = tonumber(c[2] or 0) + tonumber(c[6] or 0)
  -- The samples that were trained count, not the versions: a version may hold any number of them, or none.
  return {
    max_in_flight = max_in_flight, max_bytes = max_bytes, ahead = (staleness + 1) * per_version + trained,
    enqueued = tonumber(c[1] or 0), trained = trained,
    bytes = tonumber(c[5] or 0) - tonumber(c[7] or 0),
    lost = tonumber(c[3] or 0) + tonumber(c[4] or 0), added = 0, added_bytes = 0,
  }
end

-- Whether n more sequences with that many bytes fit. If nothing else is in the system they do, staleness permitting:
-- no waiting would make more room.
local function admits(credit, n, bytes)
  if credit.max_in_flight <= 0 then return true end
  local used = credit.enqueued + credit.added - credit.lost
  local in_flight = used - credit.trained
  if used + n > credit.ahead then return false end
  if in_flight <= 0 then return true end
  return in_flight + n <= credit.max_in_flight and credit.bytes + credit.added_bytes + bytes <= credit.max_bytes
end

-- From now on they are in use; the caller counts `added` and `added_bytes` at the end.
local function take_credit(credit, n, bytes)
  credit.added, credit.added_bytes = credit.added + n, credit.added_bytes + bytes
end
