-- The source's position, which the run's one producer moves.

-- whether one "epoch:row" is before another
local function behind(cursor, other)
  local a, b = string.match(cursor, '^(-?%d+):(-?%d+)$')
  local c, d = string.match(other, '^(-?%d+):(-?%d+)$')
  a, b, c, d = tonumber(a), tonumber(b), tonumber(c), tonumber(d)
  return a and c and (a < c or (a == c and b < d))
end

-- Why this producer may not go on: {fenced}: another one has taken over; {rewound, the stored position}: the broker
-- lost its newest part, and the source must be read again from there; nil: it may.
-- nonce: '' = no role is asked for; before: the position that the caller knows to be stored, '' = none
local function refused(source, owner, nonce, before)
  if nonce ~= '' and not owns(owner, nonce) then return { 'fenced' } end
  if before == '' then return nil end
  local stored = redis.call('HGET', source, 'cursor') or '-1:-1'
  if behind(stored, before) then return { 'rewound', stored } end
end
