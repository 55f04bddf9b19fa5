"""What the repeat guard costs, and what it saves.

        ┌▶ rule_cost   the rule alone, against a naive re-scan and vLLM's own check      ─┐
Plan ───┤                                                                                 ├─▶ measure
        └▶ measure     guard time ÷ step time, tokens saved ÷ an oracle's, two whole runs ─┘
"""
