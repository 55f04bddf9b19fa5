"""`sluice broker`: the embedded broker in the foreground."""

from __future__ import annotations

import contextlib
import signal
import threading

from sluice.pipeline.cli.options import ConfigPath, Overrides
from sluice.pipeline.terminal import say


def broker(*, config: ConfigPath = None, overrides: Overrides = ()) -> None:
    """Run the embedded broker until Ctrl-C, so that roles started by hand can share it.

    Its data survive a restart; `broker.json` in its directory (broker.embedded_dir) tells the others its address.

    Example: `sluice broker -c configs/text.yaml`
    """
    from sluice.pipeline import logs
    from sluice.pipeline.broker.embedded import embedded_broker
    from sluice.pipeline.config import load_config
    from sluice.pipeline.config.redaction import hide_password

    def finish(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    logs.configure("broker")
    settings = load_config(config, overrides)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, finish)
    with contextlib.suppress(KeyboardInterrupt), embedded_broker(settings.broker) as url:
        say(f"broker ready: {hide_password(url)} (data in {settings.broker.embedded_dir})", flush=True)
        threading.Event().wait()
