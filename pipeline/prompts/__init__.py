"""Prompts on their way to token ids, and ids on their way back to text (detokenizer).

rows (JSONL, Parquet, ─▶ admission (what a prompt may cost) ─▶ chat_template ─▶ ids ─▶ turn_tokens (later turns)
`datasets`)                                                       └─ template_cost: what its template may cost
"""
