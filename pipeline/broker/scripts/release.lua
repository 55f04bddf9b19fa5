-- needs: names log finish reply bury blame acquit
-- Hand jobs back to their place in the line, or `delay_ms` later. With `blame` (why) it counts as a death.
-- `tried`: the function gave up its attempt itself, so it counts as a try; no other ending of an attempt does.
-- ARGV owner delay_ms blame traceback max_deaths tried(0|1) then per job: id attempt
-- Returns the number of jobs handed back.
local owner, delay, why = ARGV[FIRST], tonumber(ARGV[FIRST + 1]), ARGV[FIRST + 2]
local now, released, given_back = now_ms(), 0, (#ARGV - FIRST - 5) / 2
for i = FIRST + 6, #ARGV, 2 do
  local id = ARGV[i]
  local f = redis.call('HMGET', state_of .. id, 'owner', 'attempt', 'score', 'alone', 'log', 'since', 'worker')
  if f[1] == owner and f[2] == ARGV[i + 1] then
    if why ~= '' then
      blame(id, '', given_back, tonumber(ARGV[FIRST + 4]), now, why, ARGV[FIRST + 3])
    else
      if ARGV[FIRST + 5] == '1' then redis.call('HINCRBY', state_of .. id, 'tries', 1) end
      requeue(id, f[3] or now, f[4], now, delay, logged(f[5], f[6], f[2], f[7], now, 'h'))
    end
    released = released + 1
  elseif why == '' then
    acquit(id, owner)
  end
end
return released
