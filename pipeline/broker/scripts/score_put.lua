-- Put score jobs out. A repeat puts them out twice: they are scored twice, and one answer is taken.
-- KEYS stream   ARGV job...
-- Returns their entry ids.
local ids = {}
for i = 1, #ARGV do ids[i] = redis.call('XADD', KEYS[1], '*', 's', ARGV[i]) end
return ids
