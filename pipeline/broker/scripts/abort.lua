-- needs: names
-- arq's Job.abort for jobs of ours in progress; their worker, or any worker's next claim, ends them (cancel.lua).
-- ARGV id …  Returns how many of them were in progress.
local now, asked = now_ms(), 0
for i = FIRST, #ARGV do
  local id = ARGV[i]
  if redis.call('EXISTS', answer_of .. id) == 0 and redis.call('EXISTS', payload_of .. id, state_of .. id) > 0 then
    redis.call('ZADD', aborts, math.floor(now), id)
    asked = asked + 1
  end
end
if asked > 0 then ring() end
return asked
