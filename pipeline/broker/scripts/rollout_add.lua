-- needs: rollout_names
-- Add a turn to an open rollout, each key once, and only behind the turn that it was planned to follow: if the broker
-- has lost that one with its newest writes, another may have its place.
-- ARGV id key turn mark(of what it is and sampled) parent(its place, -1 = none) parent_mark('' = not compared)
-- Returns {ok | dup | closed | changed | unknown, the turn's place or -1}
local id, key, turn = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
local parent, parent_mark = ARGV[FIRST + 4], ARGV[FIRST + 5]
local rollout = rollout_of .. id
local f = redis.call('HMGET', rollout, 'state', 'turns', 't:' .. key, 'e')
local place = tonumber(f[2] or '')
if f[1] ~= 'open' or not place then return { f[1] == 'closed' and 'closed' or 'unknown', -1 } end
redis.call('ZADD', f[4] and open_evaluated or open, now_ms() + ttl_ms, id)
if f[3] then return { 'dup', tonumber(f[3]) } end
if parent_mark ~= '' and redis.call('HGET', rollout, 'm:' .. parent) ~= parent_mark then return { 'changed', -1 } end
redis.call('HSET', rollout, 't:' .. key, place, 'turn:' .. place, turn, 'm:' .. place, ARGV[FIRST + 3], 'turns', place + 1)
if not f[4] then
  redis.call('HINCRBY', rollout, 'bytes', #turn)
  count('bytes', #turn)
end
return { 'ok', place }
