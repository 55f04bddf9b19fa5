-- Set how long a scorer has been silent about the jobs it holds: 0 keeps them, a whole lease gives them up.
-- KEYS stream   ARGV group scorer idle_ms entry_id...
-- Returns how many it still holds.
local held = 0
for i = 4, #ARGV do
  local row = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)[1]
  if row and row[2] == ARGV[2] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'IDLE', ARGV[3], 'JUSTID')
    held = held + 1
  end
end
return held
