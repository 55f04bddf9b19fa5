-- needs: rollout_names credit owns cursor
-- Open rollouts in order until the credit is used up; the rules are those of enqueue.lua.
-- ARGV max_in_flight max_bytes samples_per_version max_staleness cursor_before('' = none)
--      nonce(of the producer; '' = anybody may open)
--      then per rollout: id head stream group index size cursor('' = none) evaluated('' = no: it is trained on)
-- Returns per rollout: enqueued | duplicate (open) | done (closed) | over_credit; or a refusal: cursor.lua
local refusal = refused(source, producer, ARGV[FIRST + 5], ARGV[FIRST + 4])
if refusal then return refusal end
local credit = credit_of(counts, tonumber(ARGV[FIRST]), tonumber(ARGV[FIRST + 1]), tonumber(ARGV[FIRST + 2]),
  tonumber(ARGV[FIRST + 3]))
local until_ms, out, full, cursor = now_ms() + ttl_ms, {}, false, ''

-- open | closed | false. The broker may have lost what a producer opened, and then a call of its agent opened a group
-- of one first: an open one gets its place in the group, a closed one has left that place empty.
local function known(id, head, i)
  local rollout = rollout_of .. id
  local f = redis.call('HMGET', rollout, 'state', 'g')
  if not f[1] or f[2] ~= id or ARGV[i + 3] == id then return f[1] end
  if f[1] ~= 'open' then
    redis.call('DEL', rollout)
    return false
  end
  local more = #head - redis.call('HSTRLEN', rollout, 'head')
  redis.call('HSET', rollout, 'head', head, 'stream', ARGV[i + 2], 'g', ARGV[i + 3], 'i', ARGV[i + 4], 'n', ARGV[i + 5])
  redis.call('HINCRBY', rollout, 'bytes', more)
  count('bytes', more)
  return 'open'
end

for i = FIRST + 6, #ARGV, 8 do
  local id, head = ARGV[i], ARGV[i + 1]
  local state, is_evaluated = known(id, head, i), ARGV[i + 7] ~= ''
  local outcome = full and 'over_credit' or state == 'open' and 'duplicate' or state and 'done'
  if not outcome and not is_evaluated and not admits(credit, 1, #head) then outcome, full = 'over_credit', true end
  if not outcome then
    redis.call('HSET', rollout_of .. id, 'state', 'open', 'head', head, 'stream', ARGV[i + 2], 'g', ARGV[i + 3],
      'i', ARGV[i + 4], 'n', ARGV[i + 5], 'bytes', is_evaluated and 0 or #head, 'turns', 0)
    if is_evaluated then
      redis.call('HSET', rollout_of .. id, 'e', 1)
    else
      take_credit(credit, 1, #head)
    end
    outcome = 'enqueued'
  end
  if outcome == 'enqueued' or outcome == 'duplicate' then
    redis.call('ZADD', is_evaluated and open_evaluated or open, until_ms, id)
  end
  if outcome ~= 'over_credit' and ARGV[i + 6] ~= '' then cursor = ARGV[i + 6] end
  out[#out + 1] = outcome
end
count('enqueued', credit.added)
count('bytes', credit.added_bytes)
if cursor ~= '' then redis.call('HSET', source, 'cursor', cursor) end
return out
