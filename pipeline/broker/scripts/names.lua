-- The arguments every script of the job queue gets first (JobNames in jobs.py), and the clock.
local jobs, alone, counts, dead, dropped = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local wake, aborts, latest, source, leases = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local watch, sweep, evaluated, producer = KEYS[11], KEYS[12], KEYS[13], KEYS[14]
local state_of, progress_of, results_of = ARGV[1], ARGV[2], ARGV[3]
local payload_of, answer_of, running_of = ARGV[4], ARGV[5], ARGV[6] -- arq's own: job, result, in-progress
local claims_of, partitions, keep_ms = ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9])
local replies_of, tag, prefix_of, FIRST = ARGV[10], ARGV[11], ARGV[12], 13 -- tag: the prefix of ids on a cluster, else ''

-- Milliseconds, with microseconds as the fraction.
local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + tonumber(t[2]) / 1000
end

-- All members of a group use one partition; same as Keys.result_stream.
local function stream_of(id)
  return results_of .. (tonumber(string.sub(redis.sha1hex(id), 1, 8), 16) % partitions)
end

local function count(name, by)
  if by ~= 0 then redis.call('HINCRBY', counts, name, by) end
end

-- Whether scripts can reach arq's keys of a job.
local function in_reach(id)
  return string.sub(id, 1, #tag) == tag
end

-- false: there is none. A key of another type isn't a readable payload.
local function payload(id)
  local found = redis.pcall('GET', payload_of .. id)
  return type(found) == 'table' and '' or found
end

-- Wake one sleeping worker; it wakes the next if there is more than it can take.
local function ring()
  if redis.call('LLEN', wake) == 0 then redis.call('RPUSH', wake, 1) end
end
