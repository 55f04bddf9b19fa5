"""What new weights amid sequences cost, and how many tokens are trained with a valid proximal logprob.

plan ─┬▶ published     this process publishes, a decode worker serves: publish ─▶ first token        ─┐
      ├▶ score_cost    one update that re-prefills and scores ÷ one that only re-prefills            ─┤
      ├▶ throughput    tokens a second at one update per so many steps                               ─┼─▶ measure
      └▶ valid_share   a queue of k versions ─▶ the trainer's fill, a scorer process beside it       ─┘

Each engine is in a process of its own (child.py), one at a time.
"""
