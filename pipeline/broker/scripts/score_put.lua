-- Enqueue score jobs. A repeat enqueues them twice: they are scored twice, and one answer is used.
-- KEYS stream   ARGV job...
-- Returns their entry ids.
local ids = {}
for i = 1, #ARGV do ids[i] = redis.call('XADD', KEYS[1], '*', 's', ARGV[i]) end
return ids
