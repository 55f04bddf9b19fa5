"""`sluice generate` from its settings to its exit code.

- Every error that can be found without a model (settings, rows, part file) is raised before one is loaded.
- A sequence already in the sink isn't decoded again; if nothing is left, the engine isn't even loaded.
- Rows with images go first. If the engine takes no images, each becomes an error row; the others are decoded.
- Standard output carries only answers or the summary; what libraries print there goes to standard error.
- Standard error has a bar on a terminal, otherwise occasional plain lines; with --json, standard output has an object
  for programs as well.
- Ctrl-C and SIGTERM end a run cleanly: finished answers are kept, and the same command resumes from there.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from sluice.pipeline import logs
from sluice.pipeline.errors import ConfigError, DataError, EngineError, ModelError, SluiceError
from sluice.pipeline.prompts.rows import Malformed, is_parquet, parquet_module
from sluice.pipeline.terminal import Console, json_line, say
from sluice.workers.engine.plugins import GenerationPlugin
from sluice.workers.engine.requests import GenerationRequest
from sluice.workers.model_files import check_directory
from sluice.workers.offline.answers import Answer, number_of, row_and_index
from sluice.workers.offline.prompt_file import PromptFile, PromptRow, Scan, open_prompts
from sluice.workers.offline.settings import GenerateSettings, check_fit, make_plugins
from sluice.workers.offline.sinks import PartFile, Sink, StdoutSink, Tally, print_line

if TYPE_CHECKING:
    from sluice.workers.engine.generation_engine import GenerationEngine


SOME_ROWS_FAILED = 9  # exit code
INTERRUPTED = 130
_DIGEST_SAMPLES = 256  # places in a file
_DIGEST_SAMPLE_BYTES = 4096
_NOT_DIGESTED = (".md", ".lock")


def run(settings: GenerateSettings) -> int:
    """Answer every prompt; returns the exit code. Raises SluiceError."""
    logs.configure("generate", logging.WARNING)
    _warn_of_a_late_guard(settings)
    with _own_stdout() as stdout, _sigterm_as_sigint():
        model = model_digest(settings.model.path)  # before blocking on standard input
        plugins = make_plugins(settings.plugins)
        with open_prompts(settings.source, settings.images) as prompts:
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
        raise DataError(f"{first.error()}{others}; fix it, or turn them into error rows: --on-malformed skip")
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
    rows, indices = range(decoding.scan.total), range(settings.n)
    with PartFile(part_path, identity, restart=settings.restart) as part:
        try:
            _answer(decoding, part, stdout)
            part.finish(out, (number_of(row, index) for row in rows for index in indices))
        except KeyboardInterrupt:
            say(f"interrupted: {_kept(part, decoding)}", file=sys.stderr)
            return INTERRUPTED
        except SluiceError:
            if len(part):
                say(_kept(part, decoding), file=sys.stderr)
            raise
    return SOME_ROWS_FAILED if part.tally.errors else 0


def _kept(part: PartFile, decoding: Decoding) -> str:
    where = f", kept in {part.path}; {part.continued_by} continues from there" if len(part) else ""
    return f"{len(part)} of {decoding.total} answers are done{where}"


def _answer(decoding: Decoding, sink: Sink, stdout: IO[bytes]) -> None:
    """Put every answer into the sink, then report."""
    before = len(sink)
    if before:
        say(f"resuming: {before} of {decoding.total} answers are already done", file=sys.stderr)
    with Meter(decoding.total, sink.tally) as meter:
        decoding.run(sink, meter)
    if len(sink) != decoding.total:
        raise DataError(f"{decoding.prompts.name} changed while being read; restore it and run the command again")
    meter.report(decoding.settings, decoding.scan.total, before=before, stdout=stdout)


@contextmanager
def _own_stdout() -> Iterator[IO[bytes]]:
    """Reserve standard output for our own writes."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "wb", buffering=0) as mine:
        os.dup2(2, 1)
        try:
            yield mine
        finally:
            sys.stdout.flush()
            os.dup2(mine.fileno(), 1)


@contextmanager
def _sigterm_as_sigint() -> Iterator[None]:
    """Makes SIGTERM end the run like SIGINT; while asyncio runs, it has its own SIGINT handler."""
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.SIG_IGN:  # a background job of a script: SIGTERM must still end it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)


@dataclass
class Decoding:
    """One run over one file."""

    settings: GenerateSettings
    prompts: PromptFile
    scan: Scan
    plugins: Sequence[GenerationPlugin] = ()
    _open: dict[int, PromptRow] = field(default_factory=dict)  # by number: those in the engine
    _asked: bool = False  # the engine has read a request

    @property
    def total(self) -> int:
        """Sequences in the whole file."""
        return self.scan.total * self.settings.n

    def run(self, sink: Sink, meter: Meter) -> None:
        """Answer what isn't answered yet. Raises ModelError, EngineError, DataError."""
        for row, malformed in self.scan.malformed.items():
            for index in range(self.settings.n):
                if number_of(row, index) not in sink:
                    self._append(sink, Answer.refused(row, index, malformed))
        kinds = [image for image in (True, False) if self._pending(sink, image=image)]
        if not kinds:
            return
        meter.say(f"loading {self.settings.model.path} ({self.settings.backend})")
        with _engine(self.settings, self.prompts.folder) as engine:
            meter.begin()
            for image in kinds:
                try:
                    self._decode(engine, sink, meter, image=image)
                except EngineError as error:
                    if not image or self._asked:
                        raise
                    self._refuse_images(sink, error)
                    meter.update()

    def _decode(self, engine: GenerationEngine, sink: Sink, meter: Meter, *, image: bool) -> None:
        """Raises EngineError before reading a request if the engine takes no images."""
        requests = self._requests(sink, image=image)
        for number, result in engine.answers(requests, self.settings.options, self.plugins, image=image):
            row, index = row_and_index(number)
            asked = self._open.pop(number)
            self._append(sink, Answer.of(row, index, result, id=asked.id, metadata=asked.metadata))
            meter.update()

    def _refuse_images(self, sink: Sink, error: EngineError) -> None:
        for number, _ in self._requests(sink, image=True):
            row, index = row_and_index(number)
            asked = self._open.pop(number)
            self._append(sink, Answer.failed(row, index, error, id=asked.id, metadata=asked.metadata))

    def _pending(self, sink: Sink, *, image: bool) -> bool:
        return any(
            number_of(row, index) not in sink
            for row in range(self.scan.total)
            if row not in self.scan.malformed and (row in self.scan.with_image) == image
            for index in range(self.settings.n)
        )

    def _requests(self, sink: Sink, *, image: bool) -> Iterator[tuple[int, GenerationRequest]]:
        for at, row in self.prompts.rows():
            if at >= self.scan.total or isinstance(row, Malformed) or bool(row.images) != image:
                continue
            for index in range(self.settings.n):
                number = number_of(at, index)
                if number not in sink:
                    self._open[number], self._asked = row, True
                    anywhere = not self.settings.images.roots
                    yield number, row.request(f"row {at}", self.prompts.folder, anywhere=anywhere)

    def _append(self, sink: Sink, answer: Answer) -> None:
        sink.append(answer, answer.line(self.settings.fields))


def _engine(settings: GenerateSettings, folder: Path) -> GenerationEngine:
    from sluice.pipeline.prompts.chat_template import ChatTemplateOptions
    from sluice.pipeline.run.imports import import_slow

    import_slow()
    from sluice.workers.engine.generation_engine import GenerationEngine
    from sluice.workers.engine.requests import ModelLoadConfig

    model = msgspec.structs.asdict(settings.model)
    preprocess, path = model.pop("preprocess"), model.pop("path")
    return GenerationEngine(
        ModelLoadConfig(model_name_or_path=path, **model),
        backend=settings.backend,
        fallback_backend=settings.fallback_backend,
        max_batch=settings.max_batch,
        torch_threads=settings.torch_threads,
        chat=ChatTemplateOptions(enable_thinking=settings.enable_thinking),
        preprocess=preprocess,
        vllm=settings.vllm,
        repeat_terminate=settings.repeat_terminate,
        images=msgspec.structs.replace(settings.images, roots=settings.images.roots or (str(folder),)),
    )


def model_digest(path: str) -> str:
    """A digest of the names, sizes and sampled contents of a model directory's files.

    Samples are spread evenly over each file, so further training changes the digest. Raises ModelError.
    """
    if not Path(path).is_dir():
        what = "not a directory" if Path(path).exists() else "no such directory"
        raise ModelError(f"{path}: {what}; --model must be a directory (save_pretrained writes one), not a Hub id")
    check_directory(path)
    digest = sha256()
    for file in sorted(Path(path).iterdir()):
        if file.is_file() and not file.name.startswith(".") and file.suffix not in _NOT_DIGESTED:
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode())
            step = max(_DIGEST_SAMPLE_BYTES, size // _DIGEST_SAMPLES)
            with file.open("rb") as stream:
                for offset in range(0, size, step):
                    stream.seek(offset)
                    digest.update(stream.read(_DIGEST_SAMPLE_BYTES))
    return digest.hexdigest()


SCHEMA = 1
_PLAIN_EVERY_S = 10.0


class Meter:
    """Use it with `with`; `tally` counts the whole run, rates are for this session."""

    def __init__(self, total: int, tally: Tally) -> None:
        """`total` sequences; those in the tally are done."""
        self._total, self._tally = total, tally
        self._console = Console(stderr=True)
        self._began = self._printed = time.monotonic()
        self._tokens_before = tally.tokens
        self._bar: Progress | None = None

    def __enter__(self) -> Meter:
        return self

    def begin(self) -> None:
        """The model is loaded: start the clock."""
        self._began = self._printed = time.monotonic()
        if self._console.is_terminal:
            columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console, refresh_per_second=4)
            self._task = self._bar.add_task("", total=self._total, completed=self._tally.sequences)
            self._bar.start()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._show()
            self._bar.stop()

    @property
    def seconds(self) -> float:
        """Since decoding began."""
        return time.monotonic() - self._began

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens of this session."""
        return (self._tally.tokens - self._tokens_before) / max(self.seconds, 1e-9)

    def update(self) -> None:
        """Refresh the display from the tally."""
        if self._bar is not None:
            self._show()
        elif time.monotonic() - self._printed >= _PLAIN_EVERY_S:
            self._printed = time.monotonic()
            self.say(f"{self._tally.sequences}/{self._total}  {self._words()}")

    def say(self, line: str) -> None:
        """Print one permanent line."""
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def report(self, settings: GenerateSettings, rows: int, *, before: int, stdout: IO[bytes]) -> None:
        """Print the run's numbers; with --json also to `stdout` for programs. `before`: answers of earlier sessions."""
        tally = self._tally
        ok = tally.sequences - tally.errors
        if settings.as_json:
            numbers = {
                "out": settings.out,
                "rows": rows,
                "sequences": tally.sequences,
                "ok": ok,
                "errors": tally.errors,
                "first_error": tally.failures.first,
                "tokens": tally.tokens,
                "repeat_terminated": tally.loops,
                "tokens_per_s": round(self.tokens_per_s, 1),
                "seconds": round(self.seconds, 2),
                "done_before": before,
            }
            print_line(stdout, json_line(numbers, SCHEMA))
        for line in tally.failures.lines():
            self.say(line)
        if tally.loops:
            self.say(f"{_count(tally.loops, 'sequence')} ended by the repeat guard")
        out = "standard output" if settings.to_stdout else settings.out
        self.say(
            f"{out}: {_count(rows, 'row')}, {ok} ok, {_count(tally.errors, 'error')}, {_count(tally.tokens, 'token')}, "
            f"{self.tokens_per_s:.0f} tokens/s, {self.seconds:.1f} s"
        )
        if tally.errors and not ok and not settings.to_stdout:
            self.say(f"every row failed; fix the options and replace {out} with --restart")

    def _show(self) -> None:
        assert self._bar is not None
        self._bar.update(self._task, completed=self._tally.sequences, description=self._words())

    def _words(self) -> str:
        return f"{self.tokens_per_s:.0f} tokens/s  errors {self._tally.errors}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
