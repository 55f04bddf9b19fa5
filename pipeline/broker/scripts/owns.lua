-- Whether this process has a role: it holds the claim, or the claim expired (an outage) and nobody took it since.
local function owns(key, nonce)
  local held = redis.call('GET', key)
  if held then return held == nonce end
  return redis.call('GET', key .. ':last') == nonce
end
