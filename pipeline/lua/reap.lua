-- needs: names log finish reply bury blame watch
-- A worker process is known to be dead: end its leases now.
-- ARGV owner max_deaths
-- Returns the number of jobs that it held.
local owner, most, now, reaped = ARGV[FIRST], tonumber(ARGV[FIRST + 1]), now_ms(), 0
for _, id in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
  if redis.call('HGET', state_of .. id, 'owner') == owner then
    blame(id, '', most, now, 'its process ended')
    reaped = reaped + 1
  end
end
if redis.call('GET', alone .. ':turn') == owner then redis.call('DEL', alone .. ':turn') end
stand_down(owner)
return reaped
