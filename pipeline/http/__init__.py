"""HTTP ground of every server: who may ask, how much, how it starts and stops.

bytes ──▶ Connection ──▶ request ──▶ BearerAuth ──▶ HostGate ──▶ JsonOnly ──▶ BodyLimit ──▶ application        (serve)
"""
