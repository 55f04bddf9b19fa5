-- needs: names log line finish reply bury
-- Store what a worker read in the payload of a job that came without state.
-- ARGV owner then per job: id attempt n call('' = decode) enqueued_ms deadline_ms(0 = none) mailbox('' = none) priority
-- Returns per job: ok | expired (it has ended) | fenced
local owner, now, out = ARGV[FIRST], now_ms(), {}
for i = FIRST + 1, #ARGV, 8 do
  local id, n, call = ARGV[i], tonumber(ARGV[i + 2]), ARGV[i + 3]
  local state, deadline, at = state_of .. id, tonumber(ARGV[i + 5]), math.min(tonumber(ARGV[i + 4]), math.floor(now))
  local f = redis.call('HMGET', state, 'owner', 'attempt', 'foreign', 'score')
  if f[1] ~= owner or f[2] ~= ARGV[i + 1] then
    out[#out + 1] = 'fenced'
  else
    if f[3] then
      redis.call('HSET', state, 'n', n, 'at', at, 'call', call, 'score', in_lane(tonumber(ARGV[i + 7]), tonumber(f[4])))
      redis.call('HDEL', state, 'foreign')
      if call == '' then redis.call('HDEL', state, 'call') end
      if ARGV[i + 6] ~= '' then redis.call('HSET', state, 'reply', ARGV[i + 6]) end
      if deadline > 0 then redis.call('HSET', state, 'expires', at + deadline) end
      if asker_of(ARGV[i + 6]) then
        count('enqueued', -1)
        count('replied', 1) -- like all that leaves `enqueued` for no training, or the metric of it would fall
        count('evaluating', 1)
      else
        count('enqueued', n - 1)
      end
    end
    out[#out + 1] = 'ok'
    if deadline > 0 and now > at + deadline then
      bury(id, { ending = 'dead', reason = 'expired', detail = 'not started before its deadline' })
      out[#out] = 'expired'
    end
  end
end
return out
