-- Whether a role is this process's: it holds the claim, or the claim ran out (an outage) and nobody took it since.
local function owns(key, nonce)
  local held = redis.call('GET', key)
  if held then return held == nonce end
  return redis.call('GET', key .. ':last') == nonce
end
