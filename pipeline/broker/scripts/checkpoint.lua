-- needs: names reply acquit
-- Store the tokens that running sequences have so far, piece by piece; only the attempt that holds the job may.
-- The job's caller is told of stored tokens in the same step, so it only ever sees what a redelivery keeps.
-- A piece from offset 0 replaces what an earlier attempt stored.
-- ARGV owner then per piece: id index attempt offset tokens piece delta('' = none)
-- Returns per piece: ok | dup | gap | fenced
local owner, out, bytes = ARGV[FIRST], {}, 0
for i = FIRST + 1, #ARGV, 7 do
  local id, index, offset, piece = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 3]), ARGV[i + 5]
  local state, key = state_of .. id, progress_of .. id .. ':' .. index
  local f = redis.call('HMGET', state, 'owner', 'attempt', 'd:' .. index, 'p:' .. index, 'reply', 'far:' .. index)
  local stored, far = tonumber(f[4] or 0), tonumber(f[6] or 0)
  if f[1] ~= owner or f[2] ~= ARGV[i + 2] or f[3] then
    acquit(id, owner)
    out[#out + 1] = 'fenced'
  elseif offset > stored then
    out[#out + 1] = 'gap'
  elseif offset < stored and offset > 0 then
    out[#out + 1] = 'dup'
  else
    local before = redis.call('STRLEN', key)
    if offset == 0 then redis.call('SET', key, piece) else redis.call('APPEND', key, piece) end
    local grown, reached = redis.call('STRLEN', key) - before, offset + tonumber(ARGV[i + 4])
    redis.call('HSET', state, 'p', 1, 'p:' .. index, reached)
    if reached > math.max(stored, far) then
      redis.call('HSET', state, 'moved', f[2]) -- see blame.lua
    elseif stored > far then -- it starts again
      redis.call('HSET', state, 'far:' .. index, stored)
    end
    local is_evaluated, caller = asker_of(f[5])
    if not is_evaluated then
      redis.call('HINCRBY', state, 'bytes', grown)
      bytes = bytes + grown
    end
    if caller and ARGV[i + 6] ~= '' then tell(caller, ARGV[i + 6]) end
    out[#out + 1] = 'ok'
  end
end
count('bytes', bytes)
return out
