"""How fast the engines decode, each in a process of its own, on the same sequences.

                ┌▶ side hf            our loop over transformers ─┐
Plan ─▶ asks ───┼▶ side padded        model.generate             ─┤
                ├▶ side continuous    transformers' own batching ─┼─ Sample ─▶ compare
                └▶ side vllm, vllm_bare   our backend, vllm.LLM  ─┘
"""
