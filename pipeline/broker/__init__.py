"""Redis as every process uses it.

connection ─▶ retry (outlasts an outage) ─▶ cluster (the primary of a run's slot)      embedded: a server of our own
streams: results and batches, read by one owner at a time (ownership)
"""
