-- What happened to a job, one line per event; pipeline/queue/live_jobs.py reads it. The job's state says when it was enqueued
-- and who has held it since when; its `log` holds the failed attempts. All of it goes out with the entry that ends the
-- job: its last result, or its first tombstone and dead letter.
local LOG_BYTES, NAME_BYTES, DETAIL_BYTES = 2000, 100, 300

local function one_line(text, most)
  if #text > most then text = string.sub(text, 1, most) end
  return string.find(text, '%c') and string.gsub(text, '%c', ' ') or text
end

-- kind: e(nqueued) c(laimed) h(anded back) l(ost) x (ended)
local function event(ms, kind, attempt, worker, detail)
  return ms .. '\t' .. kind .. '\t' .. attempt .. '\t' .. worker .. '\t' .. detail .. '\n'
end

-- The log plus an attempt that has just ended. The oldest lines are dropped when it gets too long.
-- since: false if nobody held the job
local function logged(log, since, attempt, worker, now, kind, detail)
  attempt, worker = attempt or 0, one_line(worker or '', NAME_BYTES)
  log = (log or '') .. (since and event(since, 'c', attempt, worker, '') or '')
    .. event(string.format('%.0f', math.floor(now)), kind, attempt, worker, one_line(detail or '', DETAIL_BYTES))
  if #log > LOG_BYTES then log = string.sub(log, string.find(log, '\n', #log - LOG_BYTES, true) + 1) end
  return log
end

-- at: false if unknown
local function from_the_start(at, log)
  return (at and event(at, 'e', 0, '', '') or '') .. log
end
