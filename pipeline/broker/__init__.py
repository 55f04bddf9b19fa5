"""How every process uses Redis.

connection ─▶ retry (outlasts an outage, follows the primary of a run's slot)      embedded: our own server
streams: results and batches, read by one owner at a time
"""
