-- Give a role back, if it is still ours.  KEYS owner   ARGV nonce
-- A renewal that arrives later must not revive the claim: the last holder no longer owns it.
local held = redis.call('GET', KEYS[1]) == ARGV[1]
if held then redis.call('DEL', KEYS[1]) end -- first: it works on a full broker
if redis.call('GET', KEYS[1] .. ':last') == ARGV[1] then redis.call('SET', KEYS[1] .. ':last', ARGV[1] .. ':released') end
return held and 1 or 0
