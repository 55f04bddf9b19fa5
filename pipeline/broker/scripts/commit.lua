-- needs: names log finish reply acquit
-- Publish finished sequences, each once, only for the attempt that holds the job; finish jobs that are complete.
-- If the job has a mailbox, they answer its caller instead; those of an evaluation go to the evaluator, and count apart.
-- ARGV owner then per sequence: id index attempt tokens result kept_ms
-- kept_ms: '' for a sequence; else `result` is arq's result of a plain call, kept that long (see finish)
-- Returns per sequence: ok | dup | fenced
local owner, now = ARGV[FIRST], now_ms()
local out, committed, called, replied, tokens, bytes = {}, 0, 0, 0, 0, 0
local num_evaluated, over = 0, 0
look_for_empty(alone, aborts)
for i = FIRST + 1, #ARGV, 6 do
  local id, index, result = ARGV[i], ARGV[i + 1], ARGV[i + 4]
  local state = state_of .. id
  local f = redis.call('HMGET', state, 'owner', 'attempt', 'n', 'd:' .. index, 'ndone', 'bytes', 'at', 'p', 'reply',
    'log', 'since', 'worker')
  local n, ndone = tonumber(f[3]), tonumber(f[5] or 0) + 1
  if not n and redis.call('EXISTS', answer_of .. id) == 1 or f[4] then
    out[#out + 1] = 'dup'
  elseif f[1] ~= owner or f[2] ~= ARGV[i + 2] then
    acquit(id, owner)
    out[#out + 1] = 'fenced'
  elseif ARGV[i + 5] ~= '' then
    finish(id, n, f[8], result, tonumber(ARGV[i + 5]))
    called, bytes = called + n, bytes - tonumber(f[6])
    out[#out + 1] = 'ok'
  else
    local is_evaluated, caller = asker_of(f[9])
    if is_evaluated and not caller then
      evaluate(id, index, 'r', result)
      num_evaluated = num_evaluated + 1
    elseif caller then
      reply(caller, id, index, result)
      if not is_evaluated then replied = replied + 1 end
    else
      local log = ''
      if ndone >= n then log = from_the_start(f[7], logged(f[10], f[11], f[2], f[12], now, 'x', 'committed')) end
      redis.call('XADD', stream_of(id), '*', 'r', result, 'g', id, 'i', index, 'n', n, 'l', log)
      committed, bytes = committed + 1, bytes + #result
    end
    tokens = tokens + tonumber(ARGV[i + 3])
    if ndone >= n then
      finish(id, n, f[8], answer(id, nil, tonumber(f[2]), f[7], now, true, { committed = n }))
      bytes = bytes - tonumber(f[6])
      if is_evaluated then over = over + 1 end
    else
      redis.call('HSET', state, 'd:' .. index, 1, 'ndone', ndone, 'moved', f[2]) -- see blame.lua
      if f[8] then
        local key = progress_of .. id .. ':' .. index
        local freed = redis.call('STRLEN', key)
        redis.call('DEL', key)
        if not is_evaluated then
          redis.call('HINCRBY', state, 'bytes', 0 - freed)
          bytes = bytes - freed
        end
      end
    end
    out[#out + 1] = 'ok'
  end
end
count('committed', committed)
count('called', called)
count('replied', replied)
count('evaluated', num_evaluated)
count('evaluating', -over)
count('enqueued', -called - replied) -- neither is trained on
count('tokens', tokens)
count('bytes', bytes)
return out
