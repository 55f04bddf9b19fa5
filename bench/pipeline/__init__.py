"""What the pipeline costs over the engine alone.

load ──▶ bare            W processes, each the engine on its share of the jobs          ──┐
     └─▶ through_queue   broker ─▶ W `sluice worker` ─▶ result stream ─▶ sink           ──┴─▶ compare ─▶ stats
"""
