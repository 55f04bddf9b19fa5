"""`sluice generate` from its settings to its exit code.

- Everything that can be wrong without a model (settings, rows, part file) is an error before one is loaded.
- Standard output carries answers or the summary alone; what libraries print there goes to standard error.
- Ctrl-C and SIGTERM end a run in order: what is done is kept, and the same command goes on.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pipeline import logs
from pipeline.errors import ConfigError, DataError, SluiceError
from pipeline.prompts.rows import is_parquet, parquet_module
from pipeline.terminal import say
from workers.generate.decode import Decoding, Sink
from workers.generate.in_order import write_in_order
from workers.generate.meter import Meter
from workers.generate.model_digest import model_digest
from workers.generate.named_plugins import check_fit, make_plugins
from workers.generate.numbers import number_of
from workers.generate.part_file import PartFile
from workers.generate.prompt_file import PromptFile, Scan, open_prompts
from workers.generate.settings import GenerateSettings
from workers.generate.stdout_sink import StdoutSink
from workers.generate.summary import report

SOME_ROWS_FAILED = 9  # exit code
INTERRUPTED = 130


def run(settings: GenerateSettings) -> int:
    """Answer every prompt; the exit code. Raises SluiceError."""
    logs.configure("generate", logging.WARNING)
    _warn_of_a_late_guard(settings)
    with _own_stdout() as stdout, _sigterm_as_sigint():
        model = model_digest(settings.model.path)  # before standard input is waited for
        plugins = make_plugins(settings.plugins)
        with open_prompts(settings.source) as prompts:
            scan = _scanned(prompts, settings)
            check_fit(plugins, backend=settings.backend, request_types=scan.request_types)
            decoding = Decoding(settings, prompts, scan, plugins)
            if settings.to_stdout:
                return _to_stdout(decoding, stdout)
            return _to_file(decoding, {"model": model, "input": scan.digest, **settings.identity()}, stdout)


def _warn_of_a_late_guard(settings: GenerateSettings) -> None:
    guard, limit = settings.repeat_terminate, settings.options.max_new_tokens
    if guard.enabled and guard.min_new_tokens >= limit:
        say(
            f"warning: the repeat guard can never fire: min_new_tokens {guard.min_new_tokens} is not below "
            f"--max-new-tokens {limit}",
            file=sys.stderr,
        )


def _scanned(prompts: PromptFile, settings: GenerateSettings) -> Scan:
    scan = prompts.scan()
    if scan.malformed and settings.on_malformed == "stop":
        first = next(iter(scan.malformed.values()))
        others = f"; {len(scan.malformed) - 1} more are malformed" if len(scan.malformed) > 1 else ""
        raise DataError(f"{first.error()}{others}; mend it, or make error rows of them: --on-malformed skip")
    if not scan.total:
        say(f"warning: {prompts.name} has no rows, so there is nothing to answer", file=sys.stderr)
    return scan


def _to_stdout(decoding: Decoding, stdout: IO[bytes]) -> int:
    sink = StdoutSink(stdout)
    try:
        _answer(decoding, sink, stdout)
    except KeyboardInterrupt:
        say(f"interrupted: {len(sink)} of {decoding.total} answers were written", file=sys.stderr)
        return INTERRUPTED
    return SOME_ROWS_FAILED if sink.tally.errors else 0


def _to_file(decoding: Decoding, identity: dict[str, Any], stdout: IO[bytes]) -> int:
    settings = decoding.settings
    out = Path(settings.out)
    part_path = out.with_name(f"{out.name}.part")
    if out.exists() and not part_path.exists() and not settings.restart:
        raise ConfigError(f"{out} exists; choose another --out, or replace it with --restart")
    if is_parquet(out):
        parquet_module()
    with PartFile(part_path, identity, restart=settings.restart) as part:
        try:
            _answer(decoding, part, stdout)
        except KeyboardInterrupt:
            say(f"interrupted: {_kept(part, decoding)}", file=sys.stderr)
            return INTERRUPTED
        except SluiceError:
            if len(part):
                say(_kept(part, decoding), file=sys.stderr)
            raise
        rows, indices = range(decoding.scan.total), range(settings.n)
        write_in_order(out, part.lines(number_of(row, index) for row in rows for index in indices))
        part.remove()
    return SOME_ROWS_FAILED if part.tally.errors else 0


def _kept(part: PartFile, decoding: Decoding) -> str:
    where = f", kept in {part.path}; the same command goes on from there" if len(part) else ""
    return f"{len(part)} of {decoding.total} answers are done{where}"


def _answer(decoding: Decoding, sink: Sink, stdout: IO[bytes]) -> None:
    """Every answer into the sink, and what to say at the end."""
    before = len(sink)
    if before:
        say(f"going on: {before} of {decoding.total} answers were done before", file=sys.stderr)
    with Meter(decoding.total, sink.tally) as meter:
        decoding.run(sink, meter)
    if len(sink) != decoding.total:
        raise DataError(f"{decoding.prompts.name} changed while it was read; put it back and give the command again")
    report(decoding, sink.tally, meter, before=before, stdout=stdout)


@contextmanager
def _own_stdout() -> Iterator[IO[bytes]]:
    """Standard output for ourselves alone."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "wb") as mine:
        os.dup2(2, 1)
        try:
            yield mine
        finally:
            sys.stdout.flush()
            os.dup2(mine.fileno(), 1)


@contextmanager
def _sigterm_as_sigint() -> Iterator[None]:
    """One way to end; asyncio, while it runs, has a handler of its own for SIGINT."""
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.SIG_IGN:  # a background job of a script: SIGTERM must end it all the same
        signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)
