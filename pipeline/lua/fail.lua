-- A job that can never be decoded: end its uncommitted sequences as dead.
-- KEYS jobs counts dlq
-- ARGV payload_prefix state_prefix owner worker tombstone_ms id attempt reason detail
-- Returns the number of sequences that died, -1 if this attempt does not hold the job.
local state, id = ARGV[2] .. ARGV[6], ARGV[6]
local f = redis.call('HMGET', state, 'owner', 'attempt')
if f[1] ~= ARGV[3] or f[2] ~= ARGV[7] then return -1 end
return bury(id, state, ARGV[1] .. id, KEYS[1], KEYS[2], KEYS[3], tonumber(ARGV[5]), ARGV[8], ARGV[9], ARGV[4])
