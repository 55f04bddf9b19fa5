-- needs: names log finish reply bury
-- End jobs that have state and no place in the line: a worker that isn't ours removed them and doesn't know their
-- state. The first caller looks through some of the server's keys, from where the last look ended.
-- ARGV every_ms keys_at_once pattern
-- Returns {sequences ended, 1 if the look reached the end of the keys}
local now, ended = now_ms(), 0
if not redis.call('SET', sweep .. ':turn', 1, 'NX', 'PX', ARGV[FIRST]) then return { 0, 0 } end
local found = redis.call('SCAN', redis.call('GET', sweep) or '0', 'MATCH', ARGV[FIRST + 2], 'COUNT', ARGV[FIRST + 1])
for _, key in ipairs(found[2]) do
  local id = string.sub(key, #state_of + 1)
  -- If its lease is still valid, one of our workers has it and can commit it.
  if not redis.call('ZSCORE', jobs, id) and tonumber(redis.call('ZSCORE', leases, id) or 0) <= now then
    ended = ended + bury(id, {
      ending = 'dead', reason = 'taken_by_foreign_worker',
      detail = 'a worker that is no worker of Sluice took it out of the queue; only producers may be arq\'s',
    })
  end
end
if found[1] ~= '0' then
  redis.call('SET', sweep, found[1], 'PX', 3600000) -- the last workers of a run leave it
  return { ended, 0 }
end
redis.call('DEL', sweep)
return { ended, 1 }
