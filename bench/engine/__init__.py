"""How fast the engines decode, each in a process of its own, on the same sequences.

                    ┌▶ side hf            our loop over transformers ─┐
plan ─▶ load ─ asks ┼▶ side padded        model.generate             ─┤
                    ├▶ side continuous    transformers' own batching ─┼─ Sample ─▶ stats ─▶ compare
                    └▶ side vllm, vllm_bare   our backend, vllm.LLM  ─┘
"""
