"""Metrics for Prometheus: one table of names, a page per process, a page for the run.

heartbeat's row ─▶ Telemetry ─▶ MetricsServer      one process (the gateway and the rollout server add their own)
Snapshot        ─▶ families ─▶ the dashboard        the whole run
"""
