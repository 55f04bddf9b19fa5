-- needs: names admit
-- Admit jobs in order until the credit is used up.
-- ARGV max_in_flight max_bytes samples_per_version max_staleness cursor_before('' = none)
--      then per job: id payload n priority defer_ms deadline_ms(0 = none) cursor('' = none) call('' = decode)
-- Returns per job: enqueued | duplicate | done | over_credit; or {rewound, cursor}: the broker lost its newest part,
-- and the source has to be read again from there.
local max_in_flight, max_bytes = tonumber(ARGV[FIRST]), tonumber(ARGV[FIRST + 1])
local per_version, staleness = tonumber(ARGV[FIRST + 2]), tonumber(ARGV[FIRST + 3])

local function behind(cursor, other)
  local a, b = string.match(cursor, '^(-?%d+):(-?%d+)$')
  local c, d = string.match(other, '^(-?%d+):(-?%d+)$')
  a, b, c, d = tonumber(a), tonumber(b), tonumber(c), tonumber(d)
  return a and c and (a < c or (a == c and b < d))
end

local before = ARGV[FIRST + 4]
if before ~= '' then
  local stored = redis.call('HGET', source, 'cursor') or '-1:-1'
  if behind(stored, before) then return { 'rewound', stored } end
end

local c = redis.call('HMGET', counts, 'enqueued', 'trained', 'dead', 'dropped', 'bytes', 'thinned')
local enqueued, trained = tonumber(c[1] or 0), tonumber(c[2] or 0)
local lost, bytes = tonumber(c[3] or 0) + tonumber(c[4] or 0), tonumber(c[5] or 0)
-- Batches may run over samples_per_version (groups stay whole), or lose samples in the trainer: what was trained
-- counts as it is.
local so_far = math.max(tonumber(redis.call('GET', latest) or 0) * per_version - tonumber(c[6] or 0), trained)
local ahead = (staleness + 1) * per_version + so_far
local limited, now = max_in_flight > 0, now_ms()
local total = (#ARGV - FIRST - 4) / 8
local out, full, added, added_bytes, cursor = {}, false, 0, 0, ''
for k = 1, total do
  local i = FIRST + 5 + (k - 1) * 8
  local id, payload, n = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  local outcome = full and 'over_credit' or known(id)
  local used = enqueued + added + n
  if not outcome and limited and (used - trained - lost > max_in_flight or used - lost > ahead
      or (bytes + added_bytes + #payload > max_bytes and used - n - trained - lost > 0)) then
    outcome, full = 'over_credit', true
  end
  if not outcome then
    local defer, deadline = tonumber(ARGV[i + 4]), tonumber(ARGV[i + 5])
    -- A microsecond apart, so that the order of one call is kept.
    local score = now - (total - k) / 1000 - tonumber(ARGV[i + 3]) * LANE_MS
    if defer > 0 then score = now + defer end
    local expires = deadline > 0 and now + deadline or nil
    added_bytes = added_bytes + admit(id, payload, n, score, math.floor(now), expires, ARGV[i + 7])
    added, outcome = added + n, 'enqueued'
  end
  if outcome ~= 'over_credit' and ARGV[i + 6] ~= '' then cursor = ARGV[i + 6] end
  out[k] = outcome
end
count('enqueued', added)
count('bytes', added_bytes)
if cursor ~= '' then redis.call('HSET', source, 'cursor', cursor) end
if added > 0 then ring() end
return out
