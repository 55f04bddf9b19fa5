-- A worker that reports late on a job is alive: the blame for it is withdrawn.

local function acquit(id, owner)
  local kind = redis.call('HGET', state_of .. id, 'blames:' .. owner)
  if not kind then return end
  redis.call('HINCRBY', state_of .. id, kind, -1)
  redis.call('HDEL', state_of .. id, 'blames:' .. owner)
end
