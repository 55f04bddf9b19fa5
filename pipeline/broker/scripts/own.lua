-- needs: owns
-- Take or renew a role that one process plays at a time.
-- KEYS owner   ARGV nonce ttl_ms renew(1: it was ours before)
-- A claim that ran out is taken up again only while nobody else has had the role since.
-- Returns 1 when it is ours.
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return 0 end
if ARGV[3] == '1' and not owns(KEYS[1], ARGV[1]) then return 0 end
-- First, as it needs no memory: a full broker lets a script go on that has written, and takes no role away.
if held then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[1] .. ':last', ARGV[1])
return 1
