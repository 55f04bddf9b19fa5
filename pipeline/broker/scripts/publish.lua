-- needs: owns version
-- Register a weight version, and make it the newest if it serves: mostly a number above all others; an older one if a
-- kill undid what came later, which this broker may not even know if it lost its last seconds. One digest per number
-- forever. Gaps are allowed: workers pull the newest.
-- KEYS versions latest owner
-- ARGV nonce version digest manifest serves(1 | 0) then the versions to forget
-- Returns ok | fenced | conflict
if not owns(KEYS[3], ARGV[1]) then return 'fenced' end
local version = tonumber(ARGV[2])
local known = redis.call('HGET', KEYS[1], ARGV[2] .. ':digest')
if known and known ~= ARGV[3] then return 'conflict' end
local highest = tonumber(redis.call('HGET', KEYS[1], 'highest') or -1) or -1
highest = math.max(newest_version(KEYS[2]), highest, version)
redis.call('HSET', KEYS[1], ARGV[2], ARGV[4], ARGV[2] .. ':digest', ARGV[3], 'highest', highest)
for i = 6, #ARGV do redis.call('HDEL', KEYS[1], ARGV[i]) end
if ARGV[5] == '1' then redis.call('SET', KEYS[2], ARGV[2]) end
return 'ok'
