-- Register a weight version: in order, and one digest per number for ever.
-- KEYS versions latest owner   ARGV nonce version digest manifest retired
-- Returns ok | fenced | conflict | order
if not owns(KEYS[3], ARGV[1]) then return 'fenced' end
local known = redis.call('HGET', KEYS[1], ARGV[2] .. ':digest')
if known then return known == ARGV[3] and 'ok' or 'conflict' end
local latest = redis.call('GET', KEYS[2])
if latest and tonumber(ARGV[2]) ~= tonumber(latest) + 1 then return 'order' end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[4], ARGV[2] .. ':digest', ARGV[3])
redis.call('SET', KEYS[2], ARGV[2])
redis.call('HDEL', KEYS[1], ARGV[5])
return 'ok'
