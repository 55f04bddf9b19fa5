-- needs: names
-- The caller has read a job's replies: delete all of it, so its id may be enqueued again.
-- A job in progress is left alone.
-- ARGV id n
local id = ARGV[FIRST]
if redis.call('EXISTS', payload_of .. id, state_of .. id) > 0 then return 0 end
for index = 0, tonumber(ARGV[FIRST + 1]) - 1 do redis.call('DEL', replies_of .. id .. ':' .. index) end
return redis.call('DEL', answer_of .. id)
