-- needs: names log adopt finish reply bury cancel acquit
-- Extend the leases this attempt still holds.
-- ARGV owner lease_ms then per job: id attempt
-- Returns the lost ids, including cancelled ones.
local owner, lease, now = ARGV[FIRST], tonumber(ARGV[FIRST + 1]), now_ms()
local lost = cancel(owner, now)
for i = FIRST + 2, #ARGV, 2 do
  local id = ARGV[i]
  local state = state_of .. id
  local f = redis.call('HMGET', state, 'owner', 'attempt')
  if f[1] == owner and f[2] == ARGV[i + 1] then
    redis.call('PEXPIRE', running_of .. id, lease) -- first: see own.lua
    redis.call('ZADD', jobs, 'XX', now + lease, id)
    redis.call('ZADD', leases, 'XX', now + lease, id)
    redis.call('SET', running_of .. id, owner, 'PX', lease)
  else
    acquit(id, owner)
    lost[#lost + 1] = id
  end
end
return lost
