"""Shared HTTP base of every server: who may call, how much, how it starts and stops.

bytes ──▶ Connection ──▶ request ──▶ BearerAuth ──▶ HostGate ──▶ JsonOnly ──▶ BodyLimit ──▶ application        (serve)
"""
