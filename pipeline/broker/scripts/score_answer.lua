-- Answer score jobs. A job leaves the stream with its first answer; later ones come from repeats.
-- KEYS stream, then per answer: its list   ARGV group keep_ms then per answer: entry_id message ('' = nobody waits)
-- Returns the number of answers sent.
local put = 0
for i = 2, #KEYS do
  local id, message = ARGV[2 * i - 1], ARGV[2 * i]
  redis.call('XACK', KEYS[1], ARGV[1], id)
  if redis.call('XDEL', KEYS[1], id) == 1 and message ~= '' then
    redis.call('RPUSH', KEYS[i], message)
    redis.call('PEXPIRE', KEYS[i], ARGV[2])
    put = put + 1
  end
end
return put
