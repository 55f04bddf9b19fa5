-- The newest weight version; -1 before the first, and if the key holds no such number: the next version repairs it.
local function newest_version(key)
  local found = redis.pcall('GET', key) -- a table if it has another type
  local number = type(found) == 'string' and string.match(found, '^%d+$') and tonumber(found)
  return number and number <= MOST_VERSION and number or -1
end
