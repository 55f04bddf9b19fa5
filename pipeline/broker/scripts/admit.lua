-- Put a job into the queue: payload, state, place in the line.

-- Returns the bytes it holds until it ends.
-- prefixes: see prefix.lua
-- mailbox: '' = its results are trained on; that of an evaluation: neither that nor counted against the credit
local function admit(id, payload, n, score, at, expires, call, mailbox, prefixes)
  redis.call('SET', payload_of .. id, payload)
  local held = asker_of(mailbox) and 0 or #payload
  local fields = { 'n', n, 'score', score, 'at', at, 'bytes', held }
  if expires then fields[#fields + 1] = 'expires'; fields[#fields + 1] = expires end
  if call ~= '' then fields[#fields + 1] = 'call'; fields[#fields + 1] = call end
  if mailbox ~= '' then fields[#fields + 1] = 'reply'; fields[#fields + 1] = mailbox end
  if prefixes and prefixes ~= '' then fields[#fields + 1] = 'prefix'; fields[#fields + 1] = prefixes end
  redis.call('HSET', state_of .. id, unpack(fields))
  redis.call('ZADD', jobs, score, id)
  return held
end

-- whether it was enqueued before and is in progress or ended recently; nil for a new one
local function known(id)
  if redis.call('EXISTS', answer_of .. id) == 1 then return 'done' end
  if redis.call('EXISTS', payload_of .. id, state_of .. id) > 0 then return 'duplicate' end
end
