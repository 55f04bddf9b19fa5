-- needs: owns
-- The next entries for the one reader that has the stream's role; a late one takes nothing from its successor.
-- First those it was given and never saw (the answer got lost), then new ones.
-- KEYS stream [owner]   ARGV nonce group reader count last_seen
-- Returns {entries as {id, {field, value, ...}}, how many the group's readers hold now}; -1 if another took over.
if KEYS[2] and not owns(KEYS[2], ARGV[1]) then return -1 end
local found = {}
for _, from in ipairs({ ARGV[5], '>' }) do
  local answer = redis.call('XREADGROUP', 'GROUP', ARGV[2], ARGV[3], 'COUNT', ARGV[4], 'STREAMS', KEYS[1], from)
  for _, entry in ipairs(answer and answer[1][2] or {}) do
    if entry[2] then
      found[#found + 1] = entry
    else -- somebody deleted it
      redis.call('XACK', KEYS[1], ARGV[2], entry[1])
    end
  end
  if #found > 0 then break end
end
return { found, redis.call('XPENDING', KEYS[1], ARGV[2])[1] }
