-- needs: owns version
-- Register a weight version, and make it the newest if it serves: an unused number above all others, or one that was
-- registered before, to which the run returns when a kill undid later steps. One digest per number forever.
-- Gaps are allowed: workers pull the newest, and a run that returned, or a broker that lost its last seconds, leaves
-- some.
-- KEYS versions latest owner
-- ARGV nonce version digest manifest oldest(those before it are forgotten) keep('' = none; never forgotten) serves
-- Returns ok | fenced | conflict | order
if not owns(KEYS[3], ARGV[1]) then return 'fenced' end
local version, oldest, keep, serves = tonumber(ARGV[2]), tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7] == '1'
local known = redis.call('HGET', KEYS[1], ARGV[2] .. ':digest')
local highest = tonumber(redis.call('HGET', KEYS[1], 'highest') or -1) or -1
highest = math.max(newest_version(KEYS[2]), highest)
if known and known ~= ARGV[3] then return 'conflict' end
if serves and version <= highest and not known then return 'order' end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[4], ARGV[2] .. ':digest', ARGV[3], 'highest', math.max(version, highest))
if not serves then return 'ok' end
redis.call('SET', KEYS[2], ARGV[2])
for old = tonumber(redis.call('HGET', KEYS[1], 'oldest') or 0) or 0, oldest - 1 do
  if old ~= keep then redis.call('HDEL', KEYS[1], old) end
end
redis.call('HSET', KEYS[1], 'oldest', oldest)
return 'ok'
