-- A job that arq's own enqueue_job put here has no state yet: make it, and count the job. It stands for one sequence
-- until the worker that claims it has read its payload (settle.lua): scripts cannot read msgpack with bytes in it.

-- There is nothing left of it but its place in the line: one sequence that nobody can do.
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
