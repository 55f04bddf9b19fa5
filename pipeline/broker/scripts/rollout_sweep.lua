-- needs: rollout_names drop rollout_end
-- Drop rollouts that nobody has called for too long, oldest first.
-- ARGV most detail
-- Returns how many were dropped.
local ended = 0
for _, line in ipairs({ open, open_evaluated }) do
  for _, id in ipairs(redis.call('ZRANGE', line, '-inf', now_ms(), 'BYSCORE', 'LIMIT', 0, ARGV[FIRST] - ended)) do
    if drop_rollout(id, 'abandoned', ARGV[FIRST + 1]) == 'ok' then ended = ended + 1 end
    redis.call('ZREM', line, id) -- even if the broker lost its state
  end
end
return ended
