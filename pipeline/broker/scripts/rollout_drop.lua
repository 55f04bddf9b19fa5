-- needs: rollout_names drop rollout_end
-- End a rollout that yields nothing to train on.
-- ARGV id reason detail
-- Returns ok | closed | unknown
return drop_rollout(ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2])
