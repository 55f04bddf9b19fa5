-- needs: rollout_names rollout_end
-- Publish a rollout's trajectories to the result stream of its group, all of them, once. Their tokens were counted when
-- its decode jobs were answered. Of one of an evaluation the first goes to the evaluator: it shows how it ended.
-- ARGV id turns(how many the trajectories are made of) then per trajectory: result
-- Returns ok | closed | unknown | changed (its number of turns differs by now, nothing was done)
local id, parts, bytes = ARGV[FIRST], #ARGV - FIRST - 1, 0
local word, f = look(id)
if word then return word end
if redis.call('HGET', rollout_of .. id, 'turns') ~= ARGV[FIRST + 1] then return 'changed' end
if f[7] then
  evaluate(id, f, 'r', ARGV[FIRST + 2])
  return 'ok'
end
for part = 0, parts - 1 do
  local result = ARGV[FIRST + 2 + part]
  redis.call('XADD', f[2], '*', 'r', result, 'g', f[3], 'i', f[4], 'n', f[5], 'k', part, 'm', parts)
  bytes = bytes + #result
end
close(id, f)
count('committed', parts)
count('enqueued', parts - 1) -- it was enqueued as one sequence
count('bytes', bytes)
return 'ok'
