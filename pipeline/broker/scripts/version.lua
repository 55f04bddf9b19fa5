-- The newest weight version; -1 before the first, and where what stands there is no such number: the next one mends it.
local function newest_version(key)
  local found = redis.pcall('GET', key) -- a table where it is of another type
  local number = type(found) == 'string' and string.match(found, '^%d+$') and tonumber(found)
  return number and number <= MOST_VERSION and number or -1
end
