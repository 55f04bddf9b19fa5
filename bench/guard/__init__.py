"""What the repeat guard costs, and what it saves.

plan ─┬▶ pure        the rule alone, beside a naive re-scan and vLLM's own check            ─┐
      ├▶ step_share  child processes, each one engine: guard time ÷ step time               ─┤
      ├▶ saved       a model that loops, in an engine: tokens saved ÷ what an oracle saves  ─┼─▶ measure
      └▶ runs        the same model in two whole runs, without the guard and with it        ─┘
"""
