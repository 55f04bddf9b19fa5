-- needs: names watch
-- A worker was told to end: another one watches for what rings no bell, and if this one is killed before it has handed
-- back its jobs, no job is to blame.
-- ARGV owner leaving_ms(0: it holds nothing)
local owner = ARGV[FIRST]
stand_down(owner)
if ARGV[FIRST + 1] ~= '0' then redis.call('SET', leaving(owner), 1, 'PX', ARGV[FIRST + 1]) end
redis.call('ZREM', alone .. ':turns', owner)
