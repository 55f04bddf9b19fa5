"""What is still to be answered, through the engine, into a sink.

- A sequence that the sink holds is not decoded again; without any other the engine is not even loaded.
- Rows with an image go first. Where the engine takes no images each of them is an error row; the others are decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from pipeline.errors import EngineError
from pipeline.prompts.rows import Malformed
from workers.generate.answers import Answer
from workers.generate.meter import Meter
from workers.generate.numbers import number_of, row_and_index
from workers.generate.part_file import Tally
from workers.generate.prompt_file import PromptFile, PromptRow, Scan
from workers.generate.settings import GenerateSettings
from workers.generation.plugins import GenerationPlugin
from workers.generation.requests import GenerationRequest

if TYPE_CHECKING:
    from workers.generation.engine import GenerationEngine


class Sink(Protocol):
    """Where answers go."""

    tally: Tally

    def __contains__(self, number: int) -> bool:
        """True when this sequence was answered."""
        ...

    def __len__(self) -> int:
        """Answers that it was given."""
        ...

    def append(
        self, number: int, line: bytes, *, finish_reason: str, num_new_tokens: int, error: str | None = None
    ) -> None:
        """Take one answer."""
        ...


@dataclass
class Decoding:
    """One run over one file."""

    settings: GenerateSettings
    prompts: PromptFile
    scan: Scan
    plugins: Sequence[GenerationPlugin] = ()
    _open: dict[int, PromptRow] = field(default_factory=dict)  # by number: in the engine
    _asked: bool = False  # the engine has read a request

    @property
    def total(self) -> int:
        """Sequences of the whole file."""
        return self.scan.total * self.settings.n

    def run(self, sink: Sink, meter: Meter) -> None:
        """Answer what is not answered yet. Raises ModelError, EngineError, DataError."""
        for row, malformed in self.scan.malformed.items():
            for index in range(self.settings.n):
                if number_of(row, index) not in sink:
                    self._append(sink, Answer.refused(row, index, malformed))
        kinds = [image for image in (True, False) if self._pending(sink, image=image)]
        if not kinds:
            return
        meter.say(f"loading {self.settings.model.path} ({self.settings.backend})")
        with _engine(self.settings) as engine:
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
        """Raises EngineError before a request is read if the engine takes no images."""
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
                    yield number, row.request(f"row {at}", self.prompts.folder)

    def _append(self, sink: Sink, answer: Answer) -> None:
        line = answer.line(self.settings.fields)
        number = number_of(answer.row, answer.index)
        ending, count = answer.finish_reason, answer.num_new_tokens
        sink.append(number, line, finish_reason=ending, num_new_tokens=count, error=answer.error)


def _engine(settings: GenerateSettings) -> GenerationEngine:
    from pipeline.prompts.chat_template import ChatTemplateOptions
    from workers.generation.engine import GenerationEngine  # torch is slow to load
    from workers.generation.options import ModelLoadConfig

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
        images=settings.images,
    )
