-- Record one dropped sequence: its letter among the newest ones, and the counters.
local function drop(counts, dropped, reason, letter)
  redis.call('XADD', dropped, 'MAXLEN', '~', DROPPED_KEPT, '*', 'd', letter)
  redis.call('HINCRBY', counts, 'dropped', 1)
  redis.call('HINCRBY', counts, 'dropped:' .. reason, 1)
end
