"""Prompts in, decode jobs out.

rows (sources) ──▶ DecodeJob ──▶ enqueue within credit (submit) ──▶ queue
"""
