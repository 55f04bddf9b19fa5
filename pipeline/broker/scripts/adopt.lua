-- A job that arq's own enqueue_job put here has no state yet: create it, and count the job. It counts as one sequence
-- until the worker that claims it has read its payload (settle.lua): scripts can't read msgpack that contains bytes.

-- Only its place in the line is left: one sequence that nobody can decode.
local function adopt_empty(id)
  count('enqueued', 1)
  redis.call('HSET', state_of .. id, 'n', 1, 'call', '?')
end

local function adopt(id, payload, now)
  redis.call('PERSIST', payload_of .. id)
  local score = redis.call('ZSCORE', jobs, id)
  redis.call('HSET', state_of .. id, 'n', 1, 'score', score, 'at', math.floor(now), 'bytes', #payload,
    'call', '?', 'foreign', 1)
  count('enqueued', 1)
  count('bytes', #payload)
end
