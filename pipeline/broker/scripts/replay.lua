-- needs: names line reply admit unbury
-- Send dead letters of one job back to the queue as a new job. It counts as enqueued; credit doesn't hold it back.
-- The new id has never been used, so a repeat of this call recognises itself.
-- ARGV id payload n priority deadline_ms(0 = none) call('' = decode, '?' = the worker finds out: settle.lua)
--      mailbox('' = none)
--      then see unbury
-- Returns ok | gone (a row no longer exists, nothing was done) | taken (another job has this id)
local id, payload, n = ARGV[FIRST], ARGV[FIRST + 1], tonumber(ARGV[FIRST + 2])
local priority, deadline, call = tonumber(ARGV[FIRST + 3]), tonumber(ARGV[FIRST + 4]), ARGV[FIRST + 5]
if known(id) then return dead_row(ARGV[FIRST + 8]) and 'taken' or 'ok' end
local freed, now = unbury(FIRST + 7), now_ms()
if not freed then return 'gone' end
local expires = deadline > 0 and now + deadline or nil
local held = admit(id, payload, n, place(priority), math.floor(now), expires, call, ARGV[FIRST + 6])
if call == '?' then redis.call('HSET', state_of .. id, 'foreign', 1) end
count('enqueued', n)
count('replayed', n)
count('bytes', held - freed)
ring()
return 'ok'
