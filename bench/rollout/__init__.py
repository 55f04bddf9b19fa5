"""What agent rollouts cost over the engine alone, and the gateway beside vLLM's own server.

        ┌▶ added      one call at a time: gateway ─▶ worker            │ the engine in this process ─┐
Plan ───┼▶ rollouts   many at once: rollout server ⇄ gateway ─▶ worker │ their turns on that engine ─┼─▶ measure
        └▶ served     many calls at once: gateway ─▶ worker (vLLM)     │ vLLM's own OpenAI server   ─┘

The two sides of a part take turns, with the same prompts, on the same model (agent_model); both stay loaded, and idle
in the other's turn.
"""
