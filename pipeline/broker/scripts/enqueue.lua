-- needs: names line prefix reply admit credit owns cursor
-- Admit jobs in order until the credit is used up.
-- ARGV max_in_flight max_bytes samples_per_version max_staleness cursor_before('' = none)
--      nonce(of the producer; '' = anybody may enqueue)
--      then per job: id payload n priority defer_ms deadline_ms(0 = none) cursor('' = none) call('' = decode)
--      mailbox('' = none) prefix('' = none: prefix.lua)
-- Returns per job: enqueued | duplicate | done | over_credit; or a refusal: cursor.lua
local PER_JOB = 10
local refusal = refused(source, producer, ARGV[FIRST + 5], ARGV[FIRST + 4])
if refusal then return refusal end

local credit = credit_of(counts, tonumber(ARGV[FIRST]), tonumber(ARGV[FIRST + 1]), tonumber(ARGV[FIRST + 2]),
  tonumber(ARGV[FIRST + 3]))
local now, total = now_ms(), (#ARGV - FIRST - 5) / PER_JOB
local out, full, cursor, evaluating, others = {}, false, '', 0, false
come_due(jobs, now) -- jobs that came earlier go first
for k = 1, total do
  local i = FIRST + 6 + (k - 1) * PER_JOB
  local id, payload, n = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  local outcome = full and 'over_credit' or known(id)
  if not outcome and not admits(credit, n, #payload) then
    outcome, full = 'over_credit', true
  end
  if not outcome then
    local priority, defer, deadline = tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4]), tonumber(ARGV[i + 5])
    local score = defer > 0 and now + defer or place(priority)
    local expires = deadline > 0 and now + deadline or nil
    local held = admit(id, payload, n, score, math.floor(now), expires, ARGV[i + 7], ARGV[i + 8], ARGV[i + 9])
    if defer > 0 then redis.call('HSET', state_of .. id, 'priority', priority) end -- see come_due
    if not call_holder(ARGV[i + 9]) then others = true end
    if asker_of(ARGV[i + 8]) then
      evaluating = evaluating + 1
    else
      take_credit(credit, n, held)
    end
    outcome = 'enqueued'
  elseif outcome == 'duplicate' and ARGV[i + 8] ~= '' and redis.call('HEXISTS', state_of .. id, 'reply') == 1 then
    redis.call('HSET', state_of .. id, 'reply', ARGV[i + 8]) -- the latest caller is still waiting
  end
  if outcome ~= 'over_credit' and ARGV[i + 6] ~= '' then cursor = ARGV[i + 6] end
  out[k] = outcome
end
count('enqueued', credit.added)
count('bytes', credit.added_bytes)
count('evaluating', evaluating)
if cursor ~= '' then redis.call('HSET', source, 'cursor', cursor) end
if others then ring() end
return out
