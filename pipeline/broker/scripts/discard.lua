-- needs: names unbury
-- Discard dead letters of one job; their bytes become credit again.
-- ARGV see unbury
-- Returns ok | gone (a row no longer exists, nothing was done)
local freed = unbury(FIRST)
if not freed then return 'gone' end
count('bytes', -freed)
return 'ok'
