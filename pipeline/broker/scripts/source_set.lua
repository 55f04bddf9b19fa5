-- needs: owns cursor
-- What the run's one producer stores of its source, but for the position: that moves with what is enqueued.
-- KEYS source owner   ARGV nonce cursor_before('' = none) then per field: name value
-- Returns {ok}, or a refusal: cursor.lua
local refusal = refused(KEYS[1], KEYS[2], ARGV[1], ARGV[2])
if refusal then return refusal end
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
return { 'ok' }
