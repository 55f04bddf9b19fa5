"""HTTP of the gateway and the rollout server; what every server needs is in pipeline/http.

request ──▶ StrictRoute ──▶ application ──▶ add_api_page
application ──▶ guarded_session ──▶ listed hosts only        (client)
"""
