"""`sluice guard replay`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from sluice.pipeline.cli.options import ConfigPath, Json
from sluice.pipeline.terminal import escaped_json, say

app = App(name="guard", help="The repeat guard: try its thresholds on decoded sequences.")


@app.command
def replay(
    results: Annotated[Path, Parameter(help="Output of `sluice generate --fields all`, JSONL or Parquet.")],
    /,
    *,
    config: ConfigPath = None,
    model: Annotated[
        str | None, Parameter(help="Model directory; its tokenizer is needed only with max_object_keys.")
    ] = None,
    overrides: Annotated[
        tuple[str, ...],
        Parameter(name="--set", negative="", show_default=False, help="One threshold, e.g. ngram_size=32"),
    ] = (),
    vary: Annotated[
        tuple[str, ...],
        Parameter(negative="", show_default=False, help="Compare values, e.g. ngram_size=16,32; may be repeated."),
    ] = (),
    on_malformed: Annotated[
        Literal["stop", "skip"], Parameter(help="A row that cannot be read: stop, or skip it.")
    ] = "stop",
    as_json: Json = False,
) -> int:
    """Show what the thresholds of CONFIG (or the defaults) would have cut of RESULTS, without decoding again.

    RESULTS is the output of `sluice generate --fields all`, JSONL or Parquet. Tune thresholds against rows that ended
    by themselves and would have been cut. `enabled` does not matter here.

    Example: `sluice guard replay answers.jsonl --set min_new_tokens=64 --vary ngram_size=16,32,64`
    """
    from sluice.workers.guard.replay import as_json as json_text
    from sluice.workers.guard.replay import as_text, make_trials
    from sluice.workers.guard.replay import replay as run

    found = run(results, make_trials(config, overrides, vary, model), skip_malformed=on_malformed == "skip")
    for row in found.malformed:
        say(f"warning: skipped: {row.error()}", file=sys.stderr)
    if not any(trial.endings for trial in found.trials):
        say(f"warning: {results} has no sequences to replay", file=sys.stderr)
    say(escaped_json(json_text(found)) if as_json else as_text(found))
    return 0
