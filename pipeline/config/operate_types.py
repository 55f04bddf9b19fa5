"""Settings of what shows a run and what it leaves behind: history, metrics, dashboard, trackers.

The dashboard's key is no part of the configuration, which is stored with the run: SLUICE_DASHBOARD_KEY.
"""

from __future__ import annotations

from pipeline.config.section import Section


class HistoryConfig(Section, frozen=True, kw_only=True):
    """Finished sequences, in <run_dir>/<run>/history: for the dashboard and for exports."""

    enabled: bool = True
    max_sequences: int = 200_000  # of one consumer; the trainer keeps as many as all of them; the oldest go first
    max_mb: int = 2048  # of one consumer's file; the trainer's may be as large as all of theirs


class MetricsConfig(Section, frozen=True, kw_only=True):
    """`/metrics` of every process, for Prometheus."""

    enabled: bool = True
    host: str = "127.0.0.1"  # where it listens
    port: int = 0  # 0: any free one; each process says its own in its heartbeat


class DashboardConfig(Section, frozen=True, kw_only=True):
    """`sluice dashboard`: the run in a browser."""

    enabled: bool = True  # `up`, `run` and `demo` start one
    host: str = "127.0.0.1"  # where it listens; set a key before it is not loopback
    port: int = 8090  # where it is taken, `up`, `run` and `demo` use a free one
    allow_actions: bool = False  # replay and drop dead letters from the browser
    hosts: tuple[str, ...] = ()  # names by which browsers may reach it, besides localhost and its own address
    max_body_mb: float = 1  # of one request


class TrackingConfig(Section, frozen=True, kw_only=True):
    """Where the trainer's metrics go besides <run_dir>/<run>/metrics.jsonl."""

    tensorboard: bool = False  # into <run_dir>/<run>/tensorboard
    wandb: bool = False  # needs `pip install sluice[wandb]`
    trackio: bool = False
    project: str = "sluice"  # of W&B and trackio; the run's name is the configuration's
