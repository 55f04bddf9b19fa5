-- Give a role back, if it is still ours.  KEYS owner   ARGV nonce
-- A renewal that comes after it must not revive the claim: who held it last is no owner any more.
local held = redis.call('GET', KEYS[1]) == ARGV[1]
if held then redis.call('DEL', KEYS[1]) end -- first: it needs no memory of a full broker
if redis.call('GET', KEYS[1] .. ':last') == ARGV[1] then redis.call('SET', KEYS[1] .. ':last', ARGV[1] .. ':released') end
return held and 1 or 0
