-- Score jobs for one scorer: first those of scorers that have been silent for a lease, then new ones.
-- The group is created here, so a broker that lost it gets it back.
-- KEYS stream   ARGV group scorer count lease_ms
-- Returns {now in ms, {entry id, how often it was delivered before, {field, value, ...}}, ...}.
local t = redis.call('TIME')
redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
local found = { tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000) }
local count = tonumber(ARGV[3])
for _, row in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[4], '-', '+', count)) do
  local entry = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[4], row[1])[1]
  if entry and entry[2] then
    found[#found + 1] = { entry[1], row[4], entry[2] }
  else -- deleted: nobody waits for it now
    redis.call('XACK', KEYS[1], ARGV[1], row[1])
  end
end
local room = count - (#found - 1)
if room > 0 then
  local fresh = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', room, 'STREAMS', KEYS[1], '>')
  for _, entry in ipairs(fresh and fresh[1][2] or {}) do found[#found + 1] = { entry[1], 0, entry[2] } end
end
return found
