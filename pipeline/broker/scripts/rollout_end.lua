-- End a rollout: only a small hash is left, which answers late callers.

-- f: its state, place (stream, g, i, n), bytes and whether it is of an evaluation, as HMGET gives them.
local PLACE = { 'state', 'stream', 'g', 'i', 'n', 'bytes', 'e' }

-- word: nil while the rollout is open
local function look(id)
  local f = redis.pcall('HMGET', rollout_of .. id, unpack(PLACE)) -- an error: it isn't a hash
  if f.err or not f[1] then return 'unknown' end
  return f[1] ~= 'open' and 'closed' or nil, f
end

local function close(id, f)
  redis.call('DEL', rollout_of .. id)
  redis.call('HSET', rollout_of .. id, 'state', 'closed', 'g', f[3] or id, 'i', f[4] or 0, 'n', f[5] or 1)
  redis.call('PEXPIRE', rollout_of .. id, keep_ms)
  redis.call('ZREM', f[7] and open_evaluated or open, id)
  count('bytes', -(tonumber(f[6]) or 0))
end

-- One of an evaluation ended. kind: r(esult) or d(ead letter)
local function evaluate(id, f, kind, answer)
  redis.call('XADD', evaluated, '*', kind, answer, 'g', f[3], 'i', f[4])
  count('evaluated', 1)
  close(id, f)
end

-- Record its letter among the dropped ones, and a tombstone in the result stream, so its group completes. The letter of
-- one of an evaluation goes to the evaluator.
-- Returns ok | closed | unknown
local function drop_rollout(id, reason, detail)
  local word, f = look(id)
  if word then return word end
  local letter = cmsgpack.pack({
    kind = 'dead_letter', schema = 1, seq_id = id, reason = reason, state = 'dropped', detail = detail,
    at = now_ms() / 1000,
  })
  if f[7] then
    count('evaluated:' .. reason, 1)
    evaluate(id, f, 'd', letter)
    return 'ok'
  end
  drop(counts, dropped, reason, letter)
  if f[2] and f[3] and f[4] and f[5] then -- a damaged one's place in its group is unknown
    redis.call('XADD', f[2], '*', 'd', letter, 'g', f[3], 'i', f[4], 'n', f[5])
    count('bytes', #letter)
  end
  close(id, f)
  return 'ok'
end
