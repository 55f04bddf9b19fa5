"""What new weights cost while sequences run, and how many tokens are trained with a valid proximal logprob.

        ┌▶ published     this process publishes, a decode worker serves: publish ─▶ first token        ─┐
Plan ───┼▶ score_cost    one update that re-prefills and scores ÷ one that only re-prefills            ─┤
        ├▶ throughput    tokens a second at one update per so many steps                               ─┼─▶ measure
        └▶ valid_share   a queue of k versions ─▶ the trainer's fill, a scorer process beside it       ─┘
"""
