-- needs: owns
-- Take or renew a role that one process has at a time.
-- KEYS owner   ARGV nonce ttl_ms renew(1: it was ours before)
-- An expired claim can be renewed only if nobody else has had the role since.
-- Returns 1 if it is ours.
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return 0 end
if ARGV[3] == '1' and not owns(KEYS[1], ARGV[1]) then return 0 end
-- First, because it needs no memory: once a script has written, a full broker lets it continue, so roles survive.
if held then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[1] .. ':last', ARGV[1])
return 1
