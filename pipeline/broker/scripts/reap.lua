-- needs: names log finish reply bury blame watch
-- A worker process is known to be dead: end its leases now.
-- ARGV owner max_deaths killed(1: from outside, so no job is to blame)
-- Returns the number of jobs it held.
local owner, most, now = ARGV[FIRST], tonumber(ARGV[FIRST + 1]), now_ms()
local killed = ARGV[FIRST + 2] == '1' or redis.call('EXISTS', leaving(owner)) == 1
local held = held_by(owner)
for _, id in ipairs(held) do
  if killed then
    hand_back(id, now, 'its process was told to end')
  else
    blame(id, '', #held, most, now, 'its process ended')
  end
end
redis.call('ZREM', alone .. ':turns', owner)
stand_down(owner)
return #held
