-- needs: owns version
-- Register a weight version: any number above the newest, and one digest per number forever.
-- Gaps are allowed: workers pull the newest, and a trainer that resumes from an older checkpoint, or a broker that lost
-- its last seconds, leaves some.
-- KEYS versions latest owner   ARGV nonce version digest manifest retention
-- Returns ok | fenced | conflict | order
if not owns(KEYS[3], ARGV[1]) then return 'fenced' end
local version, retention = tonumber(ARGV[2]), tonumber(ARGV[5])
local known = redis.call('HGET', KEYS[1], ARGV[2] .. ':digest')
local latest = newest_version(KEYS[2])
if known and known ~= ARGV[3] then return 'conflict' end
if version <= latest then return known and 'ok' or 'order' end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[4], ARGV[2] .. ':digest', ARGV[3])
redis.call('SET', KEYS[2], ARGV[2])
for old = math.max(0, latest - retention + 1), version - retention do redis.call('HDEL', KEYS[1], old) end
return 'ok'
