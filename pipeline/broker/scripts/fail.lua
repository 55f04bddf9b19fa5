-- needs: names log finish reply bury acquit
-- A job that can never succeed: end its uncommitted sequences.
-- ARGV owner worker id attempt ending(dead | dropped) reason detail traceback shown (the id in readable form)
-- Returns the number of sequences that ended, -1 if this attempt does not hold the job.
local id = ARGV[FIRST + 2]
local f = redis.call('HMGET', state_of .. id, 'owner', 'attempt')
if f[1] ~= ARGV[FIRST] or f[2] ~= ARGV[FIRST + 3] then
  acquit(id, ARGV[FIRST])
  return -1
end
return bury(id, {
  ending = ARGV[FIRST + 4], reason = ARGV[FIRST + 5], detail = ARGV[FIRST + 6], traceback = ARGV[FIRST + 7],
  worker = ARGV[FIRST + 1], shown = ARGV[FIRST + 8],
})
