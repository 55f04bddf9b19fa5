"""The running sequences of one engine, all on the engine's event loop.

| waits | unblocked by |
|---|---|
| a decode | its tokens, its abort, a load, the core's death; before that, its image, the end of a load, its turn |
| a weight load | first tokens since the one before, the core's answer to its aborts, the end of scores, its death |
| a score | its answer, or the core's death; before it is sent, the end of a weight load |

- A sequence may be sent many times: a weight load takes it out of the core with its tokens so far, and sends the rest
  again. All tokens from one send belong to one version.
- On a resend, its tokens become the prompt: one prefill under the new weights, which also gives the proximal logprobs
  of the old version's tokens. Sequences are sent again in slices (`Resubmission`), so that tokens come in between; the
  next load waits for all of them, or their tokens would miss a version.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeVar

import msgspec

from sluice.pipeline.errors import EngineError, RequestError, SluiceError, TornWeights
from sluice.pipeline.wire.sampled_tokens import Place, Ranked
from sluice.workers.engine.adapters import OWN, Policies, Policy
from sluice.workers.engine.constraints import Constraint, Grammars
from sluice.workers.engine.contracts import SequenceOutput, SequenceRequest, check_scored, check_start
from sluice.workers.engine.plugins.base import check_plugins
from sluice.workers.engine.running import RunningSequence
from sluice.workers.engine.vllm.guard import CoreGuard
from sluice.workers.engine.vllm.resubmission import Resubmission
from sluice.workers.engine.vllm.startup import StartedEngine
from sluice.workers.guard.requests import GuardArguments

_Result = TypeVar("_Result")
_LOOK_S = 0.5
_ids = itertools.count()
_DELTA_TOKENS = 16
"""Tokens that vLLM may hold back; bounds how late a deadline, a report and `progress` see them."""


class Sequences:
    """Decodes, aborts and scores; `why_dead` says why the core died."""

    def __init__(
        self, engine: StartedEngine, version: int, why_dead: Callable[[], str], max_pause_s: float | None = None
    ) -> None:
        """`max_pause_s`: see `Resubmission`."""
        self.policies = Policies(version)
        self.loaded = version  # of the weights in the core; adapters lie beside them
        self.torn: TornWeights | None = None  # why the weights are neither the old nor the new ones
        self._engine = engine
        self._llm = engine.llm
        self._why_dead = why_dead
        self._entries = Entries(self._llm.abort, self.or_dead, max_pause_s)
        self._grammars = Grammars(lambda: engine.tokenizer, engine.facts.vocab_size)
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
        """Decode one sequence. Raises RequestError, WrongVersion or EngineError."""
        facts = self._engine.facts
        request_type = "vlm" if request.images else "text"
        check_plugins(request.plugins, backend=facts.name, hooks=facts.hooks, request_type=request_type)
        self.policies.of(request.adapter, request.seq_key)
        async with (
            self._entries.entered(request.seq_key, pausable=True) as entry,
            self._grammars.prepared(request.sampling.grammar),
        ):
            prompt = await self._prompt(request)
            sequence = self._begun(request, prompt["prompt_token_ids"])
            await self._follow(sequence, entry, prompt)
            if sequence.finish_reason is None:
                sequence.end("cancelled")
        return sequence.output()

    def close(self) -> None:
        """Compile no more grammars."""
        self._grammars.close()

    async def abort(self, seq_key: str) -> None:
        """End the sequences of this key; an unknown key is no error."""
        await self._entries.abort(seq_key)

    async def score(self, token_ids: Sequence[int], adapter: str = OWN) -> float:
        """Summed fp32 logprob of tokens 1.. . Raises EngineError."""
        return await self.score_under(self.policies.of(adapter, "score"), token_ids)

    async def score_under(self, policy: Policy, token_ids: Sequence[int]) -> float:
        """The same under a policy that needn't be among `policies`."""
        check_scored(token_ids, self._engine.facts)
        async with self._entries.entered("") as entry:
            await self._admitted(entry)
            async with self._entries.sent(entry, policy) as request_id:
                return await self._score(token_ids, request_id, policy.lora)

    async def score_in_pause(self, token_ids: Sequence[int]) -> float:
        """The same, for the holder of the pause."""
        check_scored(token_ids, self._engine.facts)
        return await self._score(token_ids, "sluice-probe")

    async def _score(self, token_ids: Sequence[int], request_id: str, lora: Any = None) -> float:
        prompt = {"type": "token", "prompt_token_ids": list(token_ids)}
        async with aclosing(self._outputs(prompt, vllm_scoring(), request_id, lora)) as outputs:
            async for output in outputs:
                if scores := _prompt_scores(output):
                    return sum(logprob for logprob, _ in scores)
        raise EngineError("vLLM gave no score")

    def _begun(self, request: SequenceRequest, prompt: Sequence[int]) -> RunningSequence:
        try:
            return RunningSequence(request, self._engine.tokenizer, self._engine.facts, prompt, self._grammars)
        except SluiceError:
            raise
        except Exception as error:  # from the tokenizer: fails this request, not the engine
            raise RequestError(f"{request.seq_key}: cannot be decoded: {error!r}") from error

    def paused(self) -> AbstractAsyncContextManager[None]:
        """A period in which nothing runs: running sequences are taken out of the core, new ones wait."""
        return self._entries.paused()

    async def leave(self, policy: Policy) -> None:
        """Take out what was sent under this policy; returns when the core has nothing of it. Others run on."""
        await self._entries.leave(policy)

    async def or_dead(self, awaitable: Awaitable[_Result]) -> _Result:
        """Wait for it, but only while the core lives; vLLM itself would wait forever. Raises EngineError."""
        task = asyncio.ensure_future(awaitable)
        try:
            while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
                if self._llm.errored:
                    raise EngineError(self._why_dead())
            return task.result()
        finally:
            task.cancel()

    def progress(self) -> float:
        """Monotonic seconds of the newest output, or now while nothing runs."""
        return self._entries.progress()

    async def _admitted(self, entry: Entry) -> None:
        """Return when it may be sent, or was aborted in a pause. Raises TornWeights."""
        await self._entries.admitted(entry)
        if self.torn is not None and not entry.aborted:
            raise TornWeights(str(self.torn))

    async def _prompt(self, request: SequenceRequest) -> Any:
        """The prompt in vLLM's form, with an image expanded. Raises RequestError."""
        if not request.images:
            return {"type": "token", "prompt_token_ids": list(request.prompt_token_ids)}
        vision = self._engine.vision
        if vision is None:
            raise RequestError(
                f"{request.seq_key}: vLLM takes no images with {self._engine.facts.model}; send only text, or use a "
                "vision-language model (model.variant auto or vlm)"
            )
        try:
            return await vision.expand(self._llm, request)
        finally:
            self._entries.beat()

    async def _follow(self, sequence: RunningSequence, entry: Entry, prompt: Any) -> None:
        """Send it and take its tokens until it ends."""
        entry.sequence = sequence
        while sequence.finish_reason is None:
            await self._admitted(entry)
            if entry.aborted:
                return
            policy = self.policies.of(sequence.request.adapter)
            if not sequence.tokens:
                check_start(sequence.request, policy.version)
            async with self._entries.sent(entry, policy) as request_id:
                await self._send(sequence, entry, prompt, request_id, policy)
                if entry.reserved is not None and sequence.finish_reason is None:
                    await self._after_reserved(sequence, entry, request_id, policy.version)

    async def _after_reserved(self, sequence: RunningSequence, entry: Entry, request_id: str, version: int) -> None:
        """vLLM ended it at the reserved id: ask the guard why. If the model chose that id, the sequence continues."""
        assert self._guard is not None
        assert entry.reserved is not None
        (token, logprob, place), entry.reserved = entry.reserved, None
        trigger = await self._guard.why(request_id)
        if trigger is not None:
            sequence.end_loop(trigger)
        else:
            sequence.push(token, logprob, version, place)

    async def _send(
        self, sequence: RunningSequence, entry: Entry, prompt: Any, request_id: str, policy: Policy
    ) -> None:
        """One request to vLLM; if the sequence ends here before it ends there, abort it there."""
        version, loaded, sampling = policy.version, self.loaded, sequence.request.sampling
        if sequence.wants_prompt and len(sequence.prompt) == 1:  # vLLM returns nothing of it
            sequence.prompt_ranked = Ranked.of(())
        final, unscored = None, sequence.unscored(version, policy.parent)
        guard = self._guard.arguments(sequence, request_id) if self._guard is not None else None
        # The tokens so far follow the expanded prompt: an image token among them is no placeholder.
        prompt = {**prompt, "prompt_token_ids": sequence.context}
        outputs = self._outputs(prompt, vllm_sampling(sequence, guard, scores=bool(unscored)), request_id, policy.lora)
        async with aclosing(outputs):
            async for output in outputs:
                if (unscored or sequence.wants_prompt) and (scores := _prompt_scores(output)):
                    begin = len(sequence.prompt) - 1
                    sequence.score(version, unscored, [scores[begin + token][0] for token in unscored])
                    unscored = []
                    if sequence.wants_prompt:
                        sequence.prompt_ranked = _ranked(scores[:begin], sampling.prompt_logprobs or 0)
                self._entries.runs(entry)
                if final is None and not sequence.tokens:
                    sequence.cached_tokens = output.num_cached_tokens or 0
                completion = output.outputs[0]
                final = completion.finish_reason
                check_version(completion.weight_versions, loaded)
                entries = _sampled(completion, sampling.top_logprobs)
                for token, (logprob, place) in zip(completion.token_ids, entries, strict=True):
                    if guard is not None and token == guard.forced:
                        entry.reserved = (token, logprob, place)
                        return
                    if sequence.push(token, logprob, version, place):
                        return
        if not (entry.aborted or entry.interrupted):
            raise EngineError(
                f"{entry.seq_key}: vLLM ended the sequence by itself ({final}) after {len(sequence.tokens)} tokens"
            )

    async def _outputs(
        self, prompt: Any, sampling: Any, request_id: str, lora: Any = None
    ) -> AsyncGenerator[Any, None]:
        """vLLM's outputs, with its errors as ours."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            async with aclosing(self._llm.generate(prompt, sampling, request_id, lora_request=lora)) as outputs:
                async for output in outputs:
                    self._entries.beat()
                    yield output
        except EngineDeadError as error:
            raise EngineError(self._why_dead()) from error
        except VLLMClientError as error:
            raise RequestError(f"vLLM refuses the request: {error}") from error
        except EngineGenerateError as error:
            raise EngineError(f"vLLM failed on one request: {error.__cause__!r}") from error

    async def _call(self, method: str, *args: Any) -> list[Any]:
        return await self.or_dead(self._llm.collective_rpc(method, args=args))


def check_version(spans: Any, version: int) -> None:
    """vLLM says in its last output which weights sampled which tokens. Raises EngineError if they are not ours."""
    if odd := [span for span in spans or () if span.version != str(version)]:
        raise EngineError(f"vLLM sampled tokens under weights {odd[0].version}, and the loaded ones are v{version}")


def _prompt_scores(output: Any) -> list[tuple[float, Place]]:
    """Logprobs and places of the prompt's tokens 1.. ; only the first output after the prefill has them."""
    return positions(output.prompt_logprobs)[1:] if output.prompt_logprobs else []


def positions(flat: Any, count: int = 0) -> list[tuple[float, Place]]:
    """The chosen token's logprob and place at each position of vLLM's flat logprobs: itself, then `count` likeliest.

    vLLM merges outputs that wait for us by way of mappings by token. There a chosen token that is one of the likeliest
    stands once, first, with its rank among them.
    """
    found: list[tuple[float, Place]] = []
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        if start == end:  # a prompt's first token
            found.append((0.0, Place(0)))
            continue
        token, logprob, rank = flat.token_ids[start], flat.logprobs[start], flat.ranks[start] or 0
        ids, logprobs = list(flat.token_ids[start + 1 : end]), list(flat.logprobs[start + 1 : end])
        if len(ids) < count:
            ids.insert(rank - 1, token)
            logprobs.insert(rank - 1, logprob)
            rank = sum(one >= logprob for one in logprobs)  # as where nothing was merged: the last of equals
        found.append((logprob, Place(rank, tuple(ids), tuple(logprobs))))
    return found


def _sampled(completion: Any, count: int | None) -> list[tuple[float | None, Place | None]]:
    """The logprobs of sampled tokens (None: not asked for), with `count` alternatives (None: without their places)."""
    if completion.logprobs is None:
        return [(None, None)] * len(completion.token_ids)
    if count is None:
        return [(logprob, None) for logprob in completion.logprobs.logprobs]
    return [(logprob, place) for logprob, place in positions(completion.logprobs, count)]


def _ranked(scores: Sequence[tuple[float, Place]], count: int) -> Ranked:
    places = [Place(place.rank, place.token_ids[:count], place.logprobs[:count]) for _, place in scores]
    return Ranked.of(places, [logprob for logprob, _ in scores])


class Entry:
    """One call; `request_id` is None unless vLLM has it."""

    __slots__ = (
        "aborted", "interrupted", "pausable", "policy", "request_id", "reserved", "seq_key", "sequence", "turn",
    )  # fmt: skip

    def __init__(self, seq_key: str, *, pausable: bool) -> None:
        self.seq_key = seq_key
        self.pausable = pausable  # it keeps its tokens when it is taken out
        self.request_id: str | None = None
        self.policy: Policy | None = None  # under which it was sent last
        self.reserved: tuple[int, float | None, Place | None] | None = (
            None  # (token, logprob, place): the repeat guard's id was sampled
        )
        self.sequence: RunningSequence | None = None
        self.turn = asyncio.Event()  # it may be sent again after a pause, or was aborted
        self.aborted = False
        self.interrupted = False  # taken out of the core for a pause, or a new version of its adapter


class Entries:
    """All calls of one engine; `abort` takes requests out of the core, keeping their tokens."""

    def __init__(
        self,
        abort: Callable[[list[str]], Awaitable[None]],
        or_dead: Callable[[Awaitable[Any]], Awaitable[Any]],
        max_pause_s: float | None = None,
    ) -> None:
        """`or_dead` waits only while the core lives."""
        self._back: Resubmission[Entry] = Resubmission(max_pause_s, self._take_turns)
        self._all_back = asyncio.Event()
        self._all_back.set()
        self._abort, self._or_dead = abort, or_dead
        self._entries: set[Entry] = set()
        self._changed = asyncio.Condition()
        self._paused = False
        self._leaving = 0  # old policies that are waited for
        self._progress = time.monotonic()

    def progress(self) -> float:
        """Monotonic seconds of the newest `beat`; now while nothing runs, or in a pause, which has its own limit."""
        return self._progress if self._entries and not self._paused else time.monotonic()

    def beat(self) -> None:
        """Record that the core produced something."""
        self._progress = time.monotonic()

    @contextlib.asynccontextmanager
    async def entered(self, seq_key: str, *, pausable: bool = False) -> AsyncIterator[Entry]:
        """Register an entry that an abort can find."""
        if not self._entries:
            self.beat()
        entry = Entry(seq_key, pausable=pausable)
        self._entries.add(entry)
        try:
            yield entry
        finally:
            self._entries.discard(entry)
            self.runs(entry)

    async def admitted(self, entry: Entry) -> None:
        """Return when it may be sent, or was aborted in a pause; then send it without awaiting anything."""
        while not entry.aborted:
            if self._paused:
                async with self._changed:
                    await self._changed.wait_for(lambda: entry.aborted or not self._paused)
            elif self._back.waits(entry):
                await entry.turn.wait()
            else:
                return

    def runs(self, entry: Entry) -> None:
        """It has a token since the pause, or ends: the others of its slice count."""
        self._back.runs(entry)
        if self._back.is_over:
            self._all_back.set()

    def _take_turns(self) -> None:
        for entry in self._entries:
            if not self._back.waits(entry):
                entry.turn.set()

    @contextlib.asynccontextmanager
    async def sent(self, entry: Entry, policy: Policy) -> AsyncIterator[str]:
        """The period in which the core has it, under the yielded id; a pause begins after it."""
        entry.request_id, entry.interrupted, entry.policy = f"sluice-{next(_ids)}", False, policy
        try:
            yield entry.request_id
        finally:
            entry.request_id = None
            if self._paused or self._leaving:
                async with self._changed:
                    self._changed.notify_all()

    async def abort(self, seq_key: str) -> None:
        """End the entries of this key; an unknown key is no error."""
        found = [entry for entry in self._entries if entry.seq_key == seq_key]
        for entry in found:
            entry.aborted = True
            entry.turn.set()
        await self._take_out(found)
        async with self._changed:
            self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """A period in which the core has nothing: sequences are taken out of it, and nothing is sent."""
        while not self._all_back.is_set() or self._paused:
            await self._or_dead(self._all_back.wait())
            async with self._changed:
                await self._changed.wait_for(lambda: not self._paused)
        self._paused = True
        pausable = [entry for entry in self._entries if entry.pausable and entry.request_id is not None]
        try:
            for entry in pausable:
                entry.interrupted = True
            await self._take_out(pausable)
            await self._or_dead(self._nothing_sent())
            yield
        finally:
            self._paused = False
            self.beat()
            self._begin_turns([entry for entry in pausable if entry in self._entries and not entry.aborted])
            async with self._changed:
                self._changed.notify_all()

    async def leave(self, policy: Policy) -> None:
        """Take out what was sent under this policy; returns when the core has nothing of it. Others run on."""

        def its() -> list[Entry]:
            return [entry for entry in self._entries if entry.policy is policy and entry.request_id is not None]

        self._leaving += 1
        try:
            running = [entry for entry in its() if entry.pausable]
            for entry in running:
                entry.interrupted = True
            await self._take_out(running)
            await self._or_dead(self._until(lambda: not its()))
        finally:
            self._leaving -= 1

    def _begin_turns(self, entries: Sequence[Entry]) -> None:
        tokens = {entry: len(entry.sequence.context) for entry in entries if entry.sequence is not None}
        if not tokens:
            return
        for entry in tokens:
            entry.turn.clear()
        self._all_back.clear()
        self._back.begin(tokens)

    async def _nothing_sent(self) -> None:
        await self._until(lambda: all(entry.request_id is None for entry in self._entries))

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(holds)

    async def _take_out(self, entries: list[Entry]) -> None:
        sent = [entry.request_id for entry in entries if entry.request_id is not None]
        if sent:
            await self._abort(sent)


def vllm_sampling(sequence: RunningSequence, guard: GuardArguments | None = None, *, scores: bool = False) -> Any:
    """`vllm.SamplingParams` for the rest of the sequence.

    vLLM also detects ends by id and length, so it stops in the same step; everything else is detected by us. The repeat
    guard's reserved id is one of those ids. With `scores`, logprobs of the whole prompt are returned too.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from sluice.workers.engine.vllm.processor import EXTRA, RESHAPED

    request, done = sequence.request, len(sequence.tokens)
    sampling = request.sampling
    sampled = sampling.temperature > 0
    extra = {
        "seed": request.seed % 2**64,
        "offset": done,
        "temperature": sampling.temperature,
        "min_p": sampling.min_p,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }
    reshaped = _reshaped(sequence)
    interval = 1 if sequence.watches_text else _DELTA_TOKENS
    if request.report_every:
        interval = min(interval, request.report_every)
    return SamplingParams(
        temperature=1.0 if sampled else 0.0,
        repetition_penalty=1.0 if reshaped else sampling.repetition_penalty,  # ours is applied after the constraint
        max_tokens=sampling.max_new_tokens - done,
        stop_token_ids=[*sequence.end_token_ids, *([guard.forced] if guard else [])],
        allowed_token_ids=list(request.allowed_token_ids) or None,
        ignore_eos=True,
        logprobs=sampling.top_logprobs or 0 if sampling.logprobs else None,
        prompt_logprobs=(sampling.prompt_logprobs or 0) if scores or sequence.wants_prompt else None,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=interval,
        extra_args={
            **({EXTRA: extra} if sampled else {}),
            **({RESHAPED: reshaped} if reshaped else {}),
            **(guard.plain() if guard else {}),
        }
        or None,
        skip_clone=True,
    )


def _reshaped(sequence: RunningSequence) -> dict[str, Any] | None:
    """What `Reshaper` applies in the core, as plain values. vLLM counts a resumed sequence's tokens as its prompt's."""
    sampling = sequence.request.sampling
    constraint = Constraint.of(sampling, sequence.tokenizer, sequence.eos)
    if constraint is None and not (sampling.presence_penalty or sampling.frequency_penalty):
        return None
    return {
        "offset": len(sequence.tokens),
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "constraint": None if constraint is None else msgspec.to_builtins(constraint),
    }


def vllm_scoring() -> Any:
    """`vllm.SamplingParams` for the logprobs of a prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
