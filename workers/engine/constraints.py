"""What narrows or biases the next token of one sequence: a grammar, lists of ids, bad words; the same on both engines.

    SamplingParams ─ Constraint.of ─▶ Constraint ─ Grammars ─▶ Narrowed: narrow(logits), take(token), narrow(logits), …

- Masks and biases come before penalties and temperature, as in vLLM. Logprobs stay those of the untouched logits.
- Grammars are xgrammar's, vLLM's own default, on both engines: its masks are applied by us, since vLLM takes its
  logprobs after its own grammar masks. They depend on the grammar, the tokenizer and the tokens so far alone.
- An ambiguous grammar's masks can take longer with each token, and the batch waits for them: a sequence has MASKS_S for
  its grammar, and MASKS_PER_TOKEN_S more with each token.
- An end-of-sequence id is allowed where the text is complete. A sequence that ends at its length may not be.
- A bad word is excluded as it is tokenised, alone and after a space, as in vLLM: other tokens may spell it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from itertools import islice
from typing import Any

import msgspec
import torch

from sluice.pipeline.errors import DeadlineExceeded, EngineError, RequestError, how_to_install
from sluice.pipeline.thread_pool import ThreadPool
from sluice.pipeline.wire.messages import Grammar, SamplingParams

LIBRARY = "xgrammar"
COMPILE_S = 5.0  # a grammar that takes longer is refused
MASKS_S = 5.0  # of one sequence; a mask usually takes a millisecond or less
MASKS_PER_TOKEN_S = 0.1
_COMPILES = 2  # at a time
_MOST_LOST = 4  # compiles that outlived COMPILE_S and still run; each has a processor
_MOST_KEPT = 64  # compiled grammars, and more only while all are in use; as many that took too long
_START_S = 60.0  # the library and the tokenizer's table, before the first grammar
NO_TOKEN = "no token is allowed here: the grammar, allowed_token_ids and bad_words exclude all; correct or remove them"

TOO_SLOW = "the grammar is too ambiguous: deriving its masks takes too long, and other sequences wait; simplify it"
UNMASKED = f"{TOO_SLOW}, unless the engine's log says why else the masks were left out"


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """As plain values, so that it travels to an engine's core."""

    allowed: tuple[int, ...] = ()  # empty: all
    bad: tuple[tuple[int, ...], ...] = ()  # token ids of the bad words
    bias: dict[int, float] = {}
    grammar: Grammar | None = None
    ends: tuple[int, ...] = ()  # ids that may end a text that matches the grammar

    @classmethod
    def of(cls, sampling: SamplingParams, tokenizer: Any, ends: Sequence[int]) -> Constraint | None:
        """None if all tokens are free. Raises RequestError for a grammar without an end-of-sequence id."""
        if not (sampling.allowed_token_ids or sampling.bad_words or sampling.logit_bias or sampling.grammar):
            return None
        if sampling.grammar is not None and not ends:
            raise RequestError("a grammar needs an end-of-sequence id; the model has none, or it is ignored")
        return cls(
            allowed=sampling.allowed_token_ids,
            bad=bad_word_ids(tokenizer, sampling.bad_words),
            bias=sampling.logit_bias,
            grammar=sampling.grammar,
            ends=tuple(ends) if sampling.grammar is not None else (),
        )


def bad_word_ids(tokenizer: Any, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, and those after a space if they are as many and begin otherwise."""
    found: list[tuple[int, ...]] = []
    for word in words:
        alone, spaced = (
            tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
        )
        if not alone:
            raise RequestError(f"bad_words: {word!r} has no tokens; remove it")
        found.append(alone)
        if len(spaced) == len(alone) and spaced[0] != alone[0]:
            found.append(spaced)
    return tuple(found)


class Grammars:
    """Compiled grammars of one tokenizer; safe in threads."""

    def __init__(self, tokenizer: Callable[[], Any], vocab_size: int, *, compile_s: float = COMPILE_S) -> None:
        """`tokenizer` is called for the first grammar. `compile_s`: a grammar that takes longer is refused."""
        self._tokenizer, self._vocab_size, self._compile_s = tokenizer, vocab_size, compile_s
        self._lock = threading.Lock()  # never for long: event loops take it
        self._making = threading.Lock()
        self._compiler: Any = None
        self._kept: OrderedDict[Grammar, Any] = OrderedDict()  # the least recently used one first
        self._in_use: Counter[Grammar] = Counter()  # number of requests that wait for it, or run with it
        self._pool = ThreadPool("grammar", _COMPILES, max_lost=_MOST_LOST)
        self._compiling: dict[tuple[asyncio.AbstractEventLoop, Grammar], asyncio.Task[None]] = {}
        self._too_slow: OrderedDict[Grammar, None] = OrderedDict()

    @contextlib.asynccontextmanager
    async def prepared(self, grammar: Grammar | None) -> AsyncIterator[None]:
        """Compiled beside the event loop, once for all who wait for it, and kept until the block ends.

        Raises RequestError. One that took too long is refused at once from then on.
        """
        if grammar is None:
            yield
            return
        with self._lock:
            self._in_use[grammar] += 1
        try:
            await self._prepare(grammar)
            yield
        finally:
            with self._lock:
                self._in_use -= Counter([grammar])
                _trim(self._kept, self._in_use)

    async def _prepare(self, grammar: Grammar) -> None:
        if grammar in self._kept and grammar not in self._too_slow:
            return
        key = asyncio.get_running_loop(), grammar
        task = self._compiling.get(key)
        if task is None:
            task = self._compiling[key] = asyncio.create_task(self._compile_beside(grammar))
            task.add_done_callback(lambda ended: self._compiled_beside(key, ended))
        # Shielded: cancelling one sequence leaves the work to the others.
        await asyncio.shield(task)

    def compiled(self, grammar: Grammar) -> Any:
        """An `xgrammar.CompiledGrammar`. Raises RequestError for one that xgrammar can't compile."""
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
                return self._kept[grammar]
        compiler = self._made_compiler()
        try:  # without the lock: a slow one delays no other
            found = _compile(compiler, grammar)
        except (RuntimeError, ValueError, TypeError) as error:
            cause = " ".join(str(error).split())
            raise RequestError(f"the grammar ({grammar.kind}) can't be compiled: {cause:.300}") from error
        with self._lock:
            _keep(self._kept, grammar, found, self._in_use)
            return found

    def close(self) -> None:
        """Its threads end, those at work once nothing waits for them."""
        self._pool.close()

    async def _compile_beside(self, grammar: Grammar) -> None:
        if grammar in self._too_slow:
            raise self._slow()
        try:
            if self._compiler is None:  # what every grammar needs counts against none
                await self._pool.run(self._made_compiler, timeout_s=_START_S, what="preparing for the first grammar")
            await self._pool.run(
                lambda: self.compiled(grammar), timeout_s=self._compile_s, what="compiling the grammar"
            )
        except DeadlineExceeded as error:
            if self._compiler is None:
                raise RequestError(str(error)) from None
            _keep(self._too_slow, grammar, None)
            raise self._slow() from None
        except RequestError:
            raise
        except EngineError:
            raise RequestError(
                f"{self._pool.lost} grammars are still being compiled after {self._compile_s:g} s, so no other one is; "
                "try again later, and simplify those"
            ) from None

    def _compiled_beside(self, key: tuple[asyncio.AbstractEventLoop, Grammar], ended: asyncio.Task[None]) -> None:
        del self._compiling[key]
        if not ended.cancelled():
            ended.exception()  # its callers may have given up

    def _slow(self) -> RequestError:
        return RequestError(f"the grammar took more than {self._compile_s:g} s to compile; simplify it")

    def _made_compiler(self) -> Any:
        with self._making:
            if self._compiler is None:
                xgrammar = _library()
                info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer(), vocab_size=self._vocab_size)
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            return self._compiler


def _keep(kept: OrderedDict[Grammar, Any], grammar: Grammar, found: Any, in_use: Collection[Grammar] = ()) -> None:
    kept[grammar] = found
    _trim(kept, in_use)


def _trim(kept: OrderedDict[Grammar, Any], in_use: Collection[Grammar]) -> None:
    spare = (grammar for grammar in kept if grammar not in in_use)
    for grammar in list(islice(spare, max(0, len(kept) - _MOST_KEPT))):
        del kept[grammar]


def library() -> str:
    """Name and version of what derives the masks; empty if it isn't installed."""
    try:
        return f"{LIBRARY} {importlib.metadata.version(LIBRARY)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _library() -> Any:
    try:
        return importlib.import_module(LIBRARY)
    except ImportError as error:
        raise RequestError(
            f"structured output needs the package {LIBRARY}, which this worker doesn't have; "
            f"{how_to_install('grammar')}, or remove the grammar"
        ) from error


def _compile(compiler: Any, grammar: Grammar) -> Any:
    match grammar.kind:
        case "json_schema":
            return compiler.compile_json_schema(grammar.text)
        case "json_object":
            return compiler.compile_json_schema('{"type": "object"}')
        case "regex":
            return compiler.compile_regex(grammar.text)
        case "grammar":
            return compiler.compile_grammar(grammar.text)
        case "structural_tag":
            return compiler.compile_structural_tag(grammar.text)
        case "choice":
            choices = msgspec.json.decode(grammar.text, type=list[str])
            return compiler.compile_grammar(
                "root ::= " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices)
            )


class Narrowed:
    """The state of one sequence under its constraint."""

    def __init__(
        self, constraint: Constraint, grammars: Grammars, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Raises RequestError for a grammar that can't be compiled."""
        self._clock, self._left_s = clock, MASKS_S
        self._allowed, self._bad, self._bias = frozenset(constraint.allowed), constraint.bad, constraint.bias
        self._longest = max(map(len, constraint.bad), default=1)
        self._tail: list[int] = []  # the newest tokens, as many as a bad word has before its last
        self._outside: torch.Tensor | None = None  # bool (vocab,)
        self._matcher: Any = None
        if constraint.grammar is not None:
            xgrammar = _library()
            compiled = grammars.compiled(constraint.grammar)
            self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(constraint.ends))
            self._vocab_size = compiled.tokenizer_info.vocab_size
            self._bits = xgrammar.allocate_token_bitmask(1, self._vocab_size)

    def narrow(self, logits: torch.Tensor) -> bool:
        """Apply it to the logits (vocab,), in place; False, and they are unchanged, if no token would be left.

        Raises RequestError, and they are unchanged, for a grammar whose masks take too long.
        """
        narrowed = logits.clone()
        if self._allowed:
            if self._outside is None:
                self._outside = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
                self._outside[list(self._allowed)] = False
            narrowed.masked_fill_(self._outside.to(logits.device), float("-inf"))  # `take` asks on the CPU
        for word in self._bad:
            if self._completes(word, word[-1]):
                narrowed[word[-1]] = float("-inf")
        # After its end xgrammar derives no mask, and an asynchronous scheduler has sent one more step by then.
        if self._matcher is not None and not self._matcher.is_terminated():
            narrowed.masked_fill_(self._outside_grammar(narrowed), float("-inf"))
        if self._bias:
            narrowed[list(self._bias)] += torch.tensor(list(self._bias.values()), device=logits.device)
        if not bool((narrowed > float("-inf")).any()):
            return bool(logits.isnan().any())  # the model's fault, which is reported elsewhere
        logits.copy_(narrowed)
        return True

    def take(self, token: int) -> None:
        """The next token of the sequence. Raises RequestError for one that isn't allowed here, or as `narrow`."""
        began = self._clock()
        is_allowed = self.admits(token)
        self._spend(began)
        if not is_allowed:
            # Where others are allowed it was sampled without the mask, which the engine's core has left out.
            is_unmasked = self._matcher is not None and self.narrow(torch.zeros(self._vocab_size))
            raise RequestError(UNMASKED if is_unmasked else NO_TOKEN)
        self._left_s += MASKS_PER_TOKEN_S

    def admits(self, token: int) -> bool:
        """Whether the next token of the sequence is allowed here; if so, it's taken."""
        allowed = not self._allowed or token in self._allowed
        allowed = allowed and not any(self._completes(word, token) for word in self._bad)
        if not allowed or (self._matcher is not None and not self._matcher.accept_token(token)):
            return False
        self._tail = [*self._tail, token][-self._longest :]
        return True

    def _completes(self, word: tuple[int, ...], token: int) -> bool:
        before = word[:-1]
        return token == word[-1] and (not before or tuple(self._tail[-len(before) :]) == before)

    def _outside_grammar(self, logits: torch.Tensor) -> torch.Tensor:
        """bool (vocab,)."""
        began = self._clock()
        self._matcher.fill_next_token_bitmask(self._bits)
        self._spend(began)
        places = torch.arange(32, dtype=torch.int32)
        bits = ((self._bits[0].unsqueeze(1) >> places) & 1).flatten()[: len(logits)] == 0
        return bits.to(logits.device)

    def _spend(self, began: float) -> None:
        self._left_s -= self._clock() - began
        if self._left_s < 0:
            raise RequestError(TOO_SLOW)
