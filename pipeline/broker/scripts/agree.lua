-- A process joins its run if it agrees with the run's contract; then it is announced, in the same step. If nobody else
-- has joined, it creates the contract, or changes it. Results are read from as many partitions as they were written to.
-- A process without a recent heartbeat that hasn't reported its end may only have lost the broker: the caller passes
-- what it saw of such rows some heartbeats ago (`still`), and they count as dead if nothing changed.
-- KEYS contract processes rollouts
-- ARGV contract name row alive_ms results_of onlookers (comma-separated roles) still
-- Returns ok | {differs, contract, participants …} | {stale, contract, what was seen}
--         | {unread, contract, what, how many}
local stored, t = redis.call('GET', KEYS[1]), redis.call('TIME')

local function others()
  local found, stale, rows = {}, {}, redis.call('HGETALL', KEYS[2])
  for i = 1, #rows, 2 do
    local readable, row = pcall(cjson.decode, rows[i + 1])
    if rows[i] ~= ARGV[2] and readable and type(row) == 'table' and type(row.at) == 'number' then
      local age_ms = (tonumber(t[1]) - row.at) * 1000 + tonumber(t[2]) / 1000
      local takes_part = not string.find(ARGV[6], ',' .. tostring(row.role) .. ',', 1, true)
      local has_ended = row.ended_at and row.ended_at ~= cjson.null
      if takes_part and not has_ended then
        if math.abs(age_ms) < tonumber(ARGV[4]) then -- the clock may have been set back since
          found[#found + 1] = rows[i]
        else
          stale[#stale + 1] = rows[i] .. ' ' .. string.format('%.17g', row.at)
        end
      end
    end
  end
  table.sort(stale)
  return found, stale
end

if stored and stored ~= ARGV[1] then
  local who, stale = others()
  if #who > 0 then return { 'differs', stored, unpack(who, 1, 100) } end
  local seen = table.concat(stale, '\n')
  if seen ~= ARGV[7] then return { 'stale', stored, seen } end
  local readable, old = pcall(cjson.decode, stored)
  local count = readable and type(old) == 'table' and tonumber(old['consumer.count']) or 0
  if count > 65536 then count = 0 end -- not a number of partitions
  if count ~= cjson.decode(ARGV[1])['consumer.count'] then
    for partition = 0, count - 1 do
      local unread = redis.call('XLEN', ARGV[5] .. partition)
      if unread > 0 then return { 'unread', stored, 'results wait in partition ' .. partition, unread } end
    end
    -- An open rollout keeps the partition it was opened with.
    local open = redis.call('ZCARD', KEYS[3])
    if open > 0 then return { 'unread', stored, 'rollouts are open', open } end
  end
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
return { 'ok' }
