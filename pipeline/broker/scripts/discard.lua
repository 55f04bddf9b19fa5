-- needs: names unbury
-- Dead letters of one job are thrown away; their bytes become credit.
-- ARGV see unbury
-- Returns ok | gone (a row is not there any more, nothing was done)
local freed = unbury(FIRST)
if not freed then return 'gone' end
count('bytes', -freed)
return 'ok'
