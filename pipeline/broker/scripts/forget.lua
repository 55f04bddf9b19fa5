-- needs: names reply
-- The caller has read a job's replies: delete all of it, so its id may be enqueued again.
-- A job in progress is left alone.
-- ARGV id n mailbox('' = none)
-- Returns what was in the mailbox and leaves it empty: words on this job would end the next one of its id.
local id, mailbox = ARGV[FIRST], ARGV[FIRST + 2]
if redis.call('EXISTS', payload_of .. id, state_of .. id) > 0 then return {} end
for index = 0, tonumber(ARGV[FIRST + 1]) - 1 do redis.call('DEL', replies_of .. id .. ':' .. index) end
redis.call('DEL', answer_of .. id)
local words = mailbox ~= '' and redis.pcall('LPOP', list_of(mailbox), MAILBOX_MOST)
return words and not words.err and words or {} -- an error: a key of another type, which is no mailbox
