"""The running sequences of one engine, all on the engine's event loop.

| waits | unblocked by |
|---|---|
| a decode | its tokens, its abort, a weight load, the core's death; before it is sent, its image, the end of a load |
| a weight load | the core's answer to its aborts, the end of scores, or the core's death |
| a score | its answer, or the core's death; before it is sent, the end of a weight load |

- What a weight load takes out of the core is sent again with its tokens as prompt: one prefill under the new weights
  that gives the proximal logprobs of the old version's tokens as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeVar

from pipeline.errors import EngineError, RequestError, SluiceError, TornWeights
from workers.generation.backends.vllm.entries import Entries, Entry
from workers.generation.backends.vllm.guard import CoreGuard
from workers.generation.backends.vllm.sampling import vllm_sampling, vllm_scoring
from workers.generation.backends.vllm.starting import StartedEngine
from workers.generation.contracts import SequenceOutput, SequenceRequest
from workers.generation.limits import check_token_ids
from workers.generation.plugins.base import check_plugins
from workers.generation.running import RunningSequence

_Result = TypeVar("_Result")
_LOOK_S = 0.5


class Sequences:
    """Decodes, aborts and scores; `why_dead` says why the core is gone."""

    def __init__(self, engine: StartedEngine, version: int, why_dead: Callable[[], str]) -> None:
        self.version = version
        self.torn: TornWeights | None = None  # why the weights are neither the old ones nor the new
        self._engine = engine
        self._llm = engine.llm
        self._why_dead = why_dead
        self._entries = Entries(self._llm.abort, self.or_dead)
        self._guard: CoreGuard | None = None
        if engine.guard is not None:
            self._guard = CoreGuard(engine.guard, engine.tokenizer, engine.facts.vocab_size, self._call)

    @property
    def guard(self) -> CoreGuard:
        """Raises EngineError if none is loaded."""
        if self._guard is None:
            raise EngineError("the vllm engine has no repeat guard; set repeat_terminate.enabled")
        return self._guard

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        """Decode one sequence. Raises RequestError or EngineError."""
        facts = self._engine.facts
        request_type = "text" if request.image is None else "vlm"
        check_plugins(request.plugins, backend=facts.name, hooks=facts.hooks, request_type=request_type)
        async with self._entries.entered(request.seq_key, pausable=True) as entry:
            prompt = await self._prompt(request)
            sequence = self._begun(request, prompt["prompt_token_ids"])
            await self._follow(sequence, entry, prompt)
            if sequence.finish_reason is None:
                sequence.end("cancelled")
        return sequence.output()

    async def abort(self, seq_key: str) -> None:
        """End the sequences of this key; one that is not here is no error."""
        await self._entries.abort(seq_key)

    async def score(self, token_ids: Sequence[int]) -> float:
        """Summed fp32 logprob of tokens 1.. . Raises EngineError."""
        self._check_scored(token_ids)
        async with self._entries.entered("") as entry:
            await self._admitted(entry)
            async with self._entries.sent(entry) as request_id:
                return await self._score(token_ids, request_id)

    async def score_in_pause(self, token_ids: Sequence[int]) -> float:
        """The same for who holds the pause."""
        self._check_scored(token_ids)
        return await self._score(token_ids, "sluice-probe")

    def _check_scored(self, token_ids: Sequence[int]) -> None:
        facts = self._engine.facts
        if len(token_ids) < 2:
            raise RequestError(f"a score needs at least 2 tokens, got {len(token_ids)}")
        check_token_ids("score", token_ids, facts.vocab_size)
        if len(token_ids) >= facts.context_length:
            raise RequestError(f"a score needs less than {facts.context_length} tokens, got {len(token_ids)}")

    async def _score(self, token_ids: Sequence[int], request_id: str) -> float:
        prompt = {"type": "token", "prompt_token_ids": list(token_ids)}
        async with aclosing(self._outputs(prompt, vllm_scoring(), request_id)) as outputs:
            async for output in outputs:
                if scores := _prompt_scores(output):
                    return sum(scores)
        raise EngineError("vLLM gave no score")

    def _begun(self, request: SequenceRequest, prompt: Sequence[int]) -> RunningSequence:
        try:
            return RunningSequence(request, self._engine.tokenizer, self._engine.facts, prompt)
        except SluiceError:
            raise
        except Exception as error:  # of the tokenizer: this request's, not the engine's
            raise RequestError(f"{request.seq_key}: cannot be decoded: {error!r}") from error

    def paused(self) -> AbstractAsyncContextManager[None]:
        """A time in which nothing runs: what does is taken out of the core, new ones wait."""
        return self._entries.paused()

    async def or_dead(self, awaitable: Awaitable[_Result]) -> _Result:
        """Wait for it, but no longer than the core lives; vLLM itself would wait for ever. Raises EngineError."""
        task = asyncio.ensure_future(awaitable)
        try:
            while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
                if self._llm.errored:
                    raise EngineError(self._why_dead())
            return task.result()
        finally:
            task.cancel()

    def progress(self) -> float:
        """Monotonic seconds of the newest output, or of now while nothing runs."""
        return self._entries.progress()

    async def _admitted(self, entry: Entry) -> None:
        """Return when it may be sent, or was aborted in a pause. Raises TornWeights."""
        await self._entries.admitted(entry)
        if self.torn is not None and not entry.aborted:
            raise TornWeights(str(self.torn))

    async def _prompt(self, request: SequenceRequest) -> Any:
        """The prompt as vLLM takes it, an image expanded. Raises RequestError."""
        if request.image is None:
            return {"type": "token", "prompt_token_ids": list(request.prompt_token_ids)}
        vision = self._engine.vision
        if vision is None:
            raise RequestError(
                f"{request.seq_key}: vLLM takes no images with {self._engine.facts.model}; send text alone, or use a "
                "vision-language model (model.variant auto or vlm)"
            )
        try:
            return await vision.expand(self._llm, request)
        finally:
            self._entries.beat()

    async def _follow(self, sequence: RunningSequence, entry: Entry, prompt: Any) -> None:
        """Send it and take its tokens until it ends."""
        while sequence.finish_reason is None:
            await self._admitted(entry)
            if entry.aborted:
                return
            version = self.version
            async with self._entries.sent(entry) as request_id:
                await self._send(sequence, entry, prompt, request_id, version)
                if entry.reserved is not None and sequence.finish_reason is None:
                    await self._after_reserved(sequence, entry, request_id, version)

    async def _after_reserved(self, sequence: RunningSequence, entry: Entry, request_id: str, version: int) -> None:
        """vLLM ended it by the reserved id: ask the guard why. A model that chose that id by itself goes on."""
        assert self._guard is not None
        assert entry.reserved is not None
        (token, logprob), entry.reserved = entry.reserved, None
        trigger = await self._guard.why(request_id)
        if trigger is not None:
            sequence.end_loop(trigger)
        else:
            sequence.push(token, logprob, version)

    async def _send(self, sequence: RunningSequence, entry: Entry, prompt: Any, request_id: str, version: int) -> None:
        """One request to vLLM; a sequence that ends here before it ends there is aborted there."""
        final, unscored = None, sequence.unscored(version)
        guard = self._guard.arguments(sequence, request_id) if self._guard is not None else None
        # The tokens so far come after the expansion: an image token among them is no placeholder.
        prompt = {**prompt, "prompt_token_ids": sequence.context}
        outputs = self._outputs(prompt, vllm_sampling(sequence, guard, scores=bool(unscored)), request_id)
        async with aclosing(outputs):
            async for output in outputs:
                if unscored and (scores := _prompt_scores(output)):
                    begin = len(sequence.prompt) - 1
                    sequence.score(version, unscored, [scores[begin + token] for token in unscored])
                    unscored = []
                completion = output.outputs[0]
                final = completion.finish_reason
                for token, logprob in zip(completion.token_ids, completion.logprobs.logprobs, strict=True):
                    if guard is not None and token == guard.forced:
                        entry.reserved = (token, logprob)
                        return
                    if sequence.push(token, logprob, version):
                        return
        if not (entry.aborted or entry.interrupted):
            raise EngineError(
                f"{entry.seq_key}: vLLM ended the sequence by itself ({final}) after {len(sequence.tokens)} tokens"
            )

    async def _outputs(self, prompt: Any, sampling: Any, request_id: str) -> AsyncGenerator[Any, None]:
        """vLLM's outputs, its errors as ours."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            async with aclosing(self._llm.generate(prompt, sampling, request_id)) as outputs:
                async for output in outputs:
                    self._entries.beat()
                    yield output
        except EngineDeadError as error:
            raise EngineError(self._why_dead()) from error
        except VLLMClientError as error:
            raise RequestError(f"vLLM refuses the request: {error}") from error
        except EngineGenerateError as error:
            raise EngineError(f"vLLM failed over one request: {error.__cause__!r}") from error

    async def _call(self, method: str, *args: Any) -> list[Any]:
        return await self.or_dead(self._llm.collective_rpc(method, args=args))


def _prompt_scores(output: Any) -> list[float]:
    """Logprobs of the prompt's tokens 1.. ; only the first output after the prefill's end has them."""
    return output.prompt_logprobs.logprobs if output.prompt_logprobs else []
