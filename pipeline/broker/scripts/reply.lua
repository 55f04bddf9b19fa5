-- Answers of jobs requested by a caller ("reply" in the job's state names its mailbox).
-- The stored reply is authoritative; the mailbox only announces it, so an announcement may get lost.
local REPLY_KEPT_MS, MAILBOX_MOST = 600 * 1000, 10000
-- A short mailbox takes small answers themselves: who reads it fetches nothing more. A long one has many readers' names,
-- whose answers are fetched together.
local TOLD_WHOLE_BYTES, TOLD_WHOLE_WORDS = 16384, 16

local function list_of(mailbox)
  return replies_of .. 'mailbox:' .. mailbox
end

-- A delta, or a sequence that has ended: its name, or WHOLE, the length of its name, ':', its name, its answer.
-- WHOLE begins neither text nor a message. A key of another type under that name isn't a mailbox.
local WHOLE = '\193'
local function tell(mailbox, word)
  local list = list_of(mailbox)
  local length = redis.pcall('RPUSH', list, word)
  if type(length) ~= 'number' then return end
  if length > MAILBOX_MOST then redis.call('LTRIM', list, -MAILBOX_MOST, -1) end -- nobody reads it
  redis.call('PEXPIRE', list, REPLY_KEPT_MS)
end

-- What a job's mailbox says: whether it is of an evaluation, and whom its results answer; nil: nobody waits for them.
local function asker_of(mailbox)
  if not mailbox or mailbox == '' then return false, nil end
  if mailbox == EVALUATION then return true, nil end
  local caller = string.match(mailbox, '^' .. EVALUATION .. ':(.*)$') -- a turn of an evaluated rollout
  return caller ~= nil, caller or mailbox
end

-- One sequence of an evaluation ended. kind: r(esult) or d(ead letter)
local function evaluate(id, index, kind, answer)
  redis.call('XADD', evaluated, '*', kind, answer, 'g', id, 'i', index)
end

local function reply(mailbox, id, index, answer)
  local name = id .. ':' .. index
  redis.call('SET', replies_of .. name, answer, 'PX', REPLY_KEPT_MS)
  local waiting = redis.pcall('LLEN', list_of(mailbox))
  local whole = #answer <= TOLD_WHOLE_BYTES and type(waiting) == 'number' and waiting < TOLD_WHOLE_WORDS
  tell(mailbox, whole and WHOLE .. #name .. ':' .. name .. answer or name)
end
