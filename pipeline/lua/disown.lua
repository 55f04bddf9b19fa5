-- Give a role back, if it is still ours.  KEYS owner   ARGV nonce
if redis.call('GET', KEYS[1] .. ':last') == ARGV[1] then redis.call('DEL', KEYS[1] .. ':last') end -- no renewal revives it
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
