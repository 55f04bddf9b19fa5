-- End every uncommitted sequence of a job, and the job.
-- dead: one row per sequence in the dead-letter stream, payload and log with the first. dropped: one row in its own
-- stream.
-- Each missing index leaves a tombstone in the result stream, so its group completes. If the job has a mailbox, its
-- caller is answered instead; dropped, it leaves the counts like any call that was answered. A sequence of an
-- evaluation only counts as evaluated, with the reason; a turn of an evaluated rollout isn't counted.
-- how: {ending = 'dead' | 'dropped', reason, detail, traceback, worker, shown = the id in readable form,
--       log = including the attempt that ended it}. Returns the number of sequences.
local function bury(id, how)
  local state = state_of .. id
  local f = redis.call('HMGET', state, 'n', 'attempt', 'at', 'bytes', 'call', 'p', 'reply', 'log', 'owner', 'since',
    'worker')
  local n, attempt, now = tonumber(f[1] or 1), tonumber(f[2] or 0), now_ms()
  local content, shown = in_reach(id) and payload(id) or '', how.shown or id
  local stream, buried, bytes = stream_of(id), 0, -tonumber(f[4] or 0)
  local is_evaluated, caller = asker_of(f[7])
  local holds_it_since = not how.log and f[9] and f[10]
  local log = logged(how.log or f[8], holds_it_since, attempt, f[11] or how.worker, now, 'x', how.reason)
  log = from_the_start(f[3], log)
  for index = 0, n - 1 do
    if redis.call('HEXISTS', state, 'd:' .. index) == 0 then
      local letter = cmsgpack.pack({
        kind = 'dead_letter', schema = 1, seq_id = shown .. ':' .. index, reason = how.reason, state = how.ending,
        detail = how.detail, traceback = how.traceback or '', attempts = attempt, worker = how.worker or '',
        at = now / 1000,
      })
      if is_evaluated then
        if not caller then evaluate(id, index, 'd', letter) end
      elseif how.ending == 'dead' then
        local first = buried == 0 and content or ''
        redis.call('XADD', dead, '*', 'd', letter, 'g', shown, 'i', index, 'n', n, 'p', first, 'l', log)
        bytes = bytes + #letter + #first
      elseif not f[7] then
        redis.call('XADD', dropped, 'MAXLEN', '~', DROPPED_KEPT, '*', 'd', letter)
      end
      if caller then
        reply(caller, id, index, letter)
      elseif not f[5] and not is_evaluated then
        redis.call('XADD', stream, '*', 'd', letter, 'g', id, 'i', index, 'n', n, 'l', log)
        bytes = bytes + #letter
      end
      buried, log = buried + 1, ''
    end
  end
  if is_evaluated then
    if not caller then
      count('evaluated', buried)
      count('evaluated:' .. how.reason, buried)
    end
    count('evaluating', -1)
  elseif f[7] and how.ending == 'dropped' then
    count('replied', buried)
    count('enqueued', -buried)
  else
    count(how.ending, buried)
    count(how.ending .. ':' .. how.reason, buried)
  end
  count('bytes', bytes)
  local kept = shown ~= id and 0 or nil -- arq can't read a key that isn't UTF-8
  finish(id, n, f[6], answer(id, f[5], attempt, f[3] or now, now, false, { error = how.reason, message = how.detail }), kept)
  return buried
end
