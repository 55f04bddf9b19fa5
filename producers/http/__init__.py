"""HTTP ground of the gateway and the rollout server: who may ask, how much, how it starts and stops.

request ──▶ BearerAuth ──▶ BodyLimit ──▶ application        (serve)
application ──▶ guarded_session ──▶ listed hosts only        (client)
"""
