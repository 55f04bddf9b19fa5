"""Structured detection: a JSON object list with boxes, matched to the truth and completed from it.

token_ids ──grammar──▶ members ──parse──▶ objects ──match──▶ pairs ──target──▶ draft ─▶ labels ─▶ sample
                                              ▲
                          truth ─▶ geometry ──┘
"""
