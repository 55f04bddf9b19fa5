"""How long a version takes from the optimiser to an engine, and how many bytes, by carrier.

training (10 Adam steps on real losses) ─▶ versions ─▶ delta (its share of the bytes; over a held link) ─▶ measure
"""
