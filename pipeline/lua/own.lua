-- Take or renew a role that one process plays at a time.  KEYS owner   ARGV nonce ttl_ms
-- Returns 1 when it is ours.
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
