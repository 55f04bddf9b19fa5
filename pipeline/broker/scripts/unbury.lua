-- Remove rows from the dead letters: all that are named, or none.
-- A job's rows follow one another, its payload with the first. If that one leaves and others stay, those are added
-- again (an entry can't be changed), the payload with the first of them.

local function dead_row(entry_id)
  local entry = redis.call('XRANGE', dead, entry_id, entry_id, 'COUNT', 1)[1]
  if not entry then return nil end
  local row = { d = '', g = '', i = '0', n = '0', p = '', l = '' } -- a damaged one lacks some
  for i = 1, #entry[2], 2 do row[entry[2][i]] = entry[2][i + 1] end
  return row
end

-- ARGV[at] is how many leave; then their entry ids, then those of the job's others if its payload leaves.
-- Returns the bytes freed, nil if a row is gone.
local function unbury(at)
  local num_leaving, freed, payload, log, staying = tonumber(ARGV[at]), 0, '', '', {}
  for i = at + 1, #ARGV do
    local row = dead_row(ARGV[i])
    if not row then return nil end
    if i > at + num_leaving then
      staying[#staying + 1] = row
    else
      freed = freed + #row.d + #row.p
      if row.p ~= '' then payload, log = row.p, row.l end
    end
  end
  for i = at + 1, #ARGV do redis.call('XDEL', dead, ARGV[i]) end
  for k, row in ipairs(staying) do
    if k == 1 and payload ~= '' then
      row.p, row.l, freed = payload, log, freed - #payload
    end
    redis.call('XADD', dead, '*', 'd', row.d, 'g', row.g, 'i', row.i, 'n', row.n, 'p', row.p, 'l', row.l)
  end
  return freed
end
