"""Rules of history, metrics and the dashboard."""

from __future__ import annotations

from pipeline.config.types import Config


def operate_checks(config: Config) -> list[tuple[bool, str]]:
    """(holds, complaint) each."""
    history, metrics, dashboard = config.history, config.metrics, config.dashboard
    return [
        (history.max_sequences >= 1, f"history.max_sequences must be >= 1, got {history.max_sequences}"),
        (history.max_mb >= 1, f"history.max_mb must be >= 1, got {history.max_mb}"),
        (0 <= metrics.port < 65_536, f"metrics.port must be in 0..65535, got {metrics.port}"),
        (0 <= dashboard.port < 65_536, f"dashboard.port must be in 0..65535, got {dashboard.port}"),
        (0 < dashboard.max_body_mb <= 64, f"dashboard.max_body_mb must be in 0..64, got {dashboard.max_body_mb}"),
    ]
