"""What the repeat guard costs, and what it saves.

        ┌▶ rule_cost    the rule alone, beside a naive re-scan and vLLM's own check            ─┐
Plan ───┼▶ engine       child processes, each one engine: guard time ÷ step time               ─┤
        ├▶ savings      a model that loops, in an engine: tokens saved ÷ what an oracle saves  ─┼─▶ measure
        └▶ whole runs   the same model in two whole runs, without the guard and with it        ─┘
"""
