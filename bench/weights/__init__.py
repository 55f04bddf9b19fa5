"""How long a version takes from the optimiser to an engine, and how many bytes, by carrier.

training (Adam steps on real losses) ─▶ lines (the trainer's end of each carrier) ─▶ worker (an engine's process that
follows them) ─▶ measure; links: a store behind a link that is held to a rate
"""
