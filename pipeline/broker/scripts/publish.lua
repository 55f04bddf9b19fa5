-- needs: owns version
-- Register a weight version: any number above the newest, and one digest per number forever.
-- Gaps are allowed: workers pull the newest, and a trainer that resumes from an older checkpoint, or a broker that lost
-- its last seconds, leaves some.
-- The kept version is never forgotten, and can be put back when the broker has lost it.
-- KEYS versions latest owner   ARGV nonce version digest manifest retention keep('' = none)
-- Returns ok | fenced | conflict | order
if not owns(KEYS[3], ARGV[1]) then return 'fenced' end
local version, retention, keep = tonumber(ARGV[2]), tonumber(ARGV[5]), tonumber(ARGV[6])
local known = redis.call('HGET', KEYS[1], ARGV[2] .. ':digest')
local latest = newest_version(KEYS[2])
if known and known ~= ARGV[3] then return 'conflict' end
if version <= latest and version ~= keep then return known and 'ok' or 'order' end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[4], ARGV[2] .. ':digest', ARGV[3])
if version <= latest then return 'ok' end
redis.call('SET', KEYS[2], ARGV[2])
for old = math.max(0, latest - retention + 1), version - retention do
  if old ~= keep then redis.call('HDEL', KEYS[1], old) end
end
return 'ok'
