"""`sluice broker`: the embedded broker in the foreground."""

from __future__ import annotations

import signal
import threading

from pipeline.cli.options import ConfigPath, Overrides


def broker(*, config: ConfigPath = None, overrides: Overrides = ()) -> None:
    """Run the embedded broker until Ctrl-C, so that roles started by hand can share it."""
    from pipeline.config import load_config
    from pipeline.config.load import hide_password
    from pipeline.embedded import embedded_broker

    settings = load_config(config, overrides)
    done = threading.Event()

    def finish(_number: int, _frame: object) -> None:
        done.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, finish)
    with embedded_broker(settings.broker) as url:
        print(f"broker ready: {hide_password(url)} (data in {settings.broker.embedded_dir})", flush=True)
        done.wait()
