-- needs: names watch
-- A worker stops: if it looked for what rings no bell, another one does from now on.
-- ARGV owner
stand_down(ARGV[FIRST])
