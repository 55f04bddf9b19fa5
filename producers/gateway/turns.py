"""A rollout's turns: one call as the next of them, and all of them as training sequences.

One call: which turn it follows, which tokens are new, and its key.

- Sampled ids of earlier turns stay unchanged; only what the messages add is tokenised.
- A turn follows the one with the longest prefix of the messages that ends in one of our assistant messages; none means
  a new history. Messages are compared in a normalised form (clients drop nulls, add empty lists, and reformat JSON),
  and a digest stands for the tools and all messages up to a point.
- Images: the worker gets one placeholder for each and expands all of them again. The ids it reports must begin with the
  known ids; the turn added the rest. Earlier images keep the digests their turn was decoded with.
- The key identifies the call: the same messages, tools, sampling and reading of the answer are the same turn, whoever
  repeats it. Fields of an added message that aren't compared count where the template mentions them.
- A mask sent by a caller is a claim about the added tokens; if it doesn't match, it is refused, never repaired.

All of them: one sequence for each leaf of the tree of turns.

    root prompt │ sampled │ added │ sampled │ added │ sampled      one path
    not in the   mask 1     mask 0  mask 1    mask 0  mask 1       token_ids, logprobs, versions, …
    arrays

- The first part is the branch with the newest turn, which shows how the rollout ended: a task finds its reward there,
  not in a branch the agent gave up.
- Nothing is trained twice: turns already in an earlier part are context in later ones, mask 0.
- Where the mask is 0 the log-probability is 0.0 and the versions are -1; a turn keeps its mask (for the end of
  sequence that the repeat guard forced).
- Its images are those of the last turn, which saw all images of the path; their expansions are context, mask 0.
- The ending is the last turn's, unless a turn was cut short (deadline, cancelled, error): then it is that one's.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

import msgspec

from sluice.pipeline.prompts.chat_template import check_token_ids, template_words
from sluice.pipeline.prompts.turn_tokens import Added, Renderer, TemplateDrift
from sluice.pipeline.queue.rollouts import Rollout, RolloutHead, Turn
from sluice.pipeline.wire.messages import (
    CUT_SHORT,
    NO_LOGPROBS,
    FinishReason,
    ImageRef,
    Message,
    Reshaped,
    SamplingParams,
    SequenceResult,
)
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.pipeline.wire.tokens import TokenArray
from sluice.producers.gateway.refusals import Refusal


@dataclass(frozen=True, slots=True)
class Plan:
    """A turn to be decoded."""

    key: str
    parent: int  # its index; -1: none
    depth: int  # turns before it on its path
    known: list[int]  # token ids up to the parent's last one, images expanded
    sent: list[int]  # the same as sent to the worker: each image is one placeholder
    added: Added  # each image is one placeholder
    images: list[ImageRef]  # of all messages, in order
    before: str  # digest of the tools and the messages that were sent
    forks: bool = False  # the rollout has turns that aren't on its path

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt for the worker, which expands the images."""
        return self.sent + self.added.token_ids

    def turn(self, result: SequenceResult, message: Message) -> Turn:
        """The turn with its answer, to be stored. Raises Refusal if earlier images were expanded otherwise before."""
        added = self.added.token_ids
        if self.images:
            seen, known = list(result.prompt_token_ids), len(self.known)
            if seen[:known] != self.known:
                at = next((at for at, pair in enumerate(zip(seen, self.known, strict=False)) if pair[0] != pair[1]), 0)
                raise Refusal(
                    409,
                    f"mask_error: from token {at} on, the images of earlier turns are expanded otherwise than before: "
                    "the workers' model.preprocess or processor has changed; begin the rollout anew",
                    "messages",
                    code="mask_error",
                    final=True,
                )
            added = seen[known:]
        return Turn(
            key=self.key,
            parent=self.parent,
            history=after(self.before, message),
            added_token_ids=TokenArray(added),
            sent_token_ids=TokenArray(self.added.token_ids if added != self.added.token_ids else ()),
            result=msgspec.structs.replace(result, prompt_token_ids=TokenArray()),
            message=message,
        )


def plan_turn(
    turns: Sequence[Turn],
    messages: Sequence[Message],
    tools: Sequence[Any],
    *,
    sampling: SamplingParams,
    renderer: Renderer,
    template_kwargs: Mapping[str, Any] | None = None,
    response_mask: Sequence[int] | None = None,
    images: Sequence[ImageRef] = (),
    read_as: Sequence[Any] = (),
) -> Plan:
    """`images` are those of the messages' parts, in order; `read_as`: how the answer is read, if not as usual.

    Raises Refusal (400) for a mask or template that doesn't match, RequestError, ModelError.
    """
    kwargs = template_kwargs or {}
    with_tools = replace(renderer, options=replace(renderer.options, tools=tools, kwargs=kwargs))
    places = digests(messages, tools, kwargs)
    found = goes_on_from(turns, messages, places)
    path = path_to(turns, found.turn) if found else []
    known, sent = known_token_ids(path), sent_token_ids(path)
    try:
        added = with_tools.added(messages, at=found.at, known=sent) if found else Added(with_tools.prompt(messages))
    except TemplateDrift as error:
        raise Refusal(400, f"mask_error: {error}", "messages", code="mask_error") from error
    shown = path[-1].result.images if path else []
    if response_mask and len(images) > len(shown):
        raise _mask_error("a call that adds an image has no mask: the engine counts its tokens; send null")
    check_mask(response_mask, len(added.token_ids), first=found is None)
    added_messages = messages[found.at + 1 :] if found else messages
    more = [list(part) for part in (read_as, _shown_besides(added_messages, tools, renderer)) if part]
    return Plan(
        key=digest([places[-1], msgspec.to_builtins(sampling), *more]),
        parent=found.turn if found else -1,
        depth=len(path),
        known=known,
        sent=sent,
        added=added,
        images=[*shown, *images[len(shown) :]],
        before=places[-1],
        forks=len(turns) > 0 and (found is None or any(turn.parent == found.turn for turn in turns)),
    )


def plan_tokens(
    turns: Sequence[Turn], token_ids: list[int], *, sampling: SamplingParams, placeholders: Mapping[int, str]
) -> Plan:
    """A call whose prompt is token ids: it follows the turn with the longest sequence that its prompt begins with.

    Raises Refusal (400) for a rollout with images, RequestError for an image placeholder.
    """
    parent = _longest_prefix(turns, token_ids)
    path = path_to(turns, parent) if parent >= 0 else []
    if any(turn.result.images for turn in path):
        raise Refusal(400, "token_ids: this rollout has images; go on with /v1/chat/completions", "token_ids")
    known = known_token_ids(path)
    added = token_ids[len(known) :]
    check_token_ids(added, placeholders)
    before = digest(["token_ids", token_ids])
    return Plan(
        key=digest([before, msgspec.to_builtins(sampling)]),
        parent=parent,
        depth=len(path),
        known=known,
        sent=known,
        added=Added(added),
        images=[],
        before=before,
        forks=len(turns) > 0 and (parent < 0 or any(turn.parent == parent for turn in turns)),
    )


def _longest_prefix(turns: Sequence[Turn], token_ids: list[int]) -> int:
    """The turn whose tokens, from the root's prompt on, are the longest prefix of these; the newest of several; or -1.

    Every turn is compared once, after its parent: its tokens begin where the parent's end.
    """
    best, longest = -1, 0
    ends: list[int] = []  # of each turn; -1: it isn't a prefix
    for place, turn in enumerate(turns):
        start = ends[turn.parent] if turn.parent >= 0 else 0
        segment = [*turn.added_token_ids, *turn.result.token_ids] if start >= 0 else []
        fits = start >= 0 and token_ids[start : start + len(segment)] == segment
        ends.append(start + len(segment) if fits else -1)
        if ends[-1] >= longest and fits:
            best, longest = place, ends[-1]
    return best


def check_mask(mask: Sequence[int] | None, num_added: int, *, first: bool) -> None:
    """Raises Refusal (400) unless the mask is omitted or has a 0 for each added token."""
    if mask is None or (first and not mask):
        return
    if len(mask) != num_added:
        what = "the prompt" if first else "what this call adds to the rollout"
        raise _mask_error(f"response_mask has {len(mask)} values, but {what} has {num_added} tokens")
    if any(mask):
        at = list(mask).index(1)
        raise _mask_error(f"response_mask[{at}] is 1, but these tokens were not sampled; send 0 for each, or null")


def _mask_error(message: str) -> Refusal:
    return Refusal(400, f"mask_error: {message}", "response_mask", code="mask_error")


class Known(Protocol):
    """The part of a turn that this module reads."""

    @property
    def history(self) -> str:
        """Digest of the tools and all messages up to and with the turn's answer."""
        ...


class Found(NamedTuple):
    """`turn`: its index among the known ones; `at`: the index of its answer among the messages."""

    turn: int
    at: int


def digest(value: Any) -> str:
    """A short name for a JSON value; the same for equal ones."""
    return sha256(_canonical(value).encode()).hexdigest()[:32]


def digests(
    messages: Sequence[Message], tools: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> list[str]:
    """Entry k stands for the tools, the template's variables and the first k messages; shape (len(messages) + 1,)."""
    found = [digest([list(tools), kwargs] if kwargs else list(tools))]
    for message in messages:
        found.append(after(found[-1], message))
    return found


def after(before: str, message: Message) -> str:
    """The digest after appending this message."""
    return digest([before, normal(message)])


def goes_on_from(turns: Sequence[Known], messages: Sequence[Message], places: Sequence[str]) -> Found | None:
    """The turn with the longest history that is a prefix of these messages, whose `digests` are `places`; the newest of
    several."""
    newest = {turn.history: place for place, turn in enumerate(turns)}
    for at in range(len(messages) - 1, -1, -1):
        if messages[at].get("role") == "assistant" and (place := newest.get(places[at + 1])) is not None:
            return Found(place, at)
    return None


_COMPARED = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "is_error"})


def _shown_besides(messages: Sequence[Message], tools: Sequence[Any], renderer: Renderer) -> list[Any]:
    """(message, name, value) of fields that aren't compared and that the template mentions, such as its reasoning."""
    others = [(at, name) for at, message in enumerate(messages) for name in sorted(message.keys() - _COMPARED)]
    words = template_words(renderer.tokenizer, tools) if others else frozenset[str]()
    return [[at, name, messages[at][name]] for at, name in others if name in words and messages[at][name]]


def normal(message: Message) -> dict[str, Any]:
    """The parts of a message that count: role, content, calls, the call it answers, and name."""
    kept: dict[str, Any] = {"role": message.get("role"), "content": _content(message.get("content"))}
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [_call(call) for call in calls]
    for name in ("tool_call_id", "name"):
        if message.get(name) is not None:
            kept[name] = message[name]
    if message.get("is_error"):
        kept["is_error"] = True
    return kept


def _content(content: Any) -> Any:
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text") or "") for part in content)
    return content or ""


def _call(call: dict[str, Any]) -> list[Any]:
    function: dict[str, Any] = call.get("function") or {}
    arguments = function.get("arguments")
    with contextlib.suppress(ValueError, RecursionError):  # not JSON: the string itself is compared
        arguments = _in_doubles(json.loads(arguments) if isinstance(arguments, str) else arguments)
    return [call.get("id"), function.get("name"), arguments]


def _in_doubles(value: Any) -> Any:
    """JSON as JavaScript reads it, and so writes it back: it has no other numbers."""
    if isinstance(value, dict):
        return {name: _in_doubles(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_in_doubles(one) for one in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    with contextlib.suppress(OverflowError):  # beyond any double
        return float(value) + 0.0  # there is no negative zero in its JSON
    return value


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The caller's verdict on a whole rollout."""

    final_status: str = "COMPLETED"
    reward: float | None = None
    rewards: dict[str, float] | None = None  # its parts by name
    truth: Any = None  # None: the head's
    num_turns: int | None = None  # calls that were answered; None: nobody counted them


def path_to(turns: Sequence[Turn], place: int) -> list[Turn]:
    """The turns from a root to this one."""
    return [turns[at] for at in _places(turns, place)]


def known_token_ids(path: Sequence[Turn]) -> list[int]:
    """Every token of a path, the root's prompt included."""
    return [token for turn in path for part in (turn.added_token_ids, turn.result.token_ids) for token in part]


def sent_token_ids(path: Sequence[Turn]) -> list[int]:
    """The same as sent to workers: each image is one placeholder."""
    return [token for turn in path for part in (_sent(turn), turn.result.token_ids) for token in part]


def _sent(turn: Turn) -> TokenArray:
    return turn.sent_token_ids if len(turn.sent_token_ids) else turn.added_token_ids


def trajectories(rollout: Rollout, verdict: Verdict) -> list[SequenceResult]:
    """One result for each leaf, the newest one first; at least one turn is needed."""
    turns = rollout.turns
    parents = {turn.parent for turn in turns}
    leaves = [place for place in reversed(range(len(turns))) if place not in parents]
    seen: set[int] = set()
    results: list[SequenceResult] = []
    for part, leaf in enumerate(leaves):
        path = _places(turns, leaf)
        tokens = _sampled([turns[place] for place in path], [place not in seen for place in path])
        seen.update(path)
        about = _about(rollout.head, [turns[place].result for place in path], verdict, len(turns), len(leaves))
        results.append(
            SequenceResult(
                **about,
                seq_id=f"{rollout.head.rollout_id}/{part}" if part else rollout.head.rollout_id,
                part=part,
                prompt_token_ids=TokenArray(turns[path[0]].added_token_ids),
                reshaped=_reshaped([turns[place] for place in path]),
                **tokens.columns(),
            )
        )
    return results


def _places(turns: Sequence[Turn], place: int) -> list[int]:
    places: list[int] = []
    while place >= 0:
        places.append(place)
        place = turns[place].parent
    return places[::-1]


def _sampled(path: Sequence[Turn], is_new: Sequence[bool]) -> SampledTokens:
    """Everything after the root's prompt; turns that are not new were sampled in an earlier part."""
    whole = SampledTokens()
    for depth, (turn, new) in enumerate(zip(path, is_new, strict=True)):
        if depth:
            whole += SampledTokens.context(turn.added_token_ids)
        whole += turn.result.sampled if new else SampledTokens.context(turn.result.token_ids)
    return whole.with_mask()


def _reshaped(path: Sequence[Turn]) -> list[Reshaped]:
    """Those of the turns, from the end of the root's prompt on."""
    found: list[Reshaped] = []
    at = -len(path[0].added_token_ids)
    for turn in path:
        at += len(turn.added_token_ids)
        found += [msgspec.structs.replace(one, start=one.start + at, end=one.end + at) for one in turn.result.reshaped]
        at += len(turn.result.token_ids)
    return found


def _about(
    head: RolloutHead, results: Sequence[SequenceResult], verdict: Verdict, num_turns: int, parts: int
) -> dict[str, Any]:
    """All fields of a trajectory that aren't arrays."""
    last = results[-1]
    return {
        "rollout_id": head.rollout_id,
        "group_id": head.group_id,
        "group_size": head.group_size,
        "index": head.index,
        "parts": parts,
        "turn": len(results),
        "reward": verdict.reward,
        "worker": last.worker,
        "backend": last.backend,
        "engine_version": last.engine_version,
        "text": last.text,
        "raw_text": last.raw_text,
        "finish_reason": _ending(results),
        "stop_reason": last.stop_reason,
        "triggers": last.triggers,
        "images": last.images,
        "logprobs_mode": last.logprobs_mode if all(one.has_logprobs for one in results) else NO_LOGPROBS,
        "keeps_cache": any(one.keeps_cache for one in results),
        "sampling": last.sampling,
        "timings": {
            "enqueued_at": head.opened_at,
            "queue_s": round(sum(one.timings.get("queue_s", 0.0) for one in results), 4),
            "decode_s": round(sum(one.timings.get("decode_s", 0.0) for one in results), 4),
            "finished_at": max(one.timings.get("finished_at", 0.0) for one in results),
        },
        "trace": head.trace or results[0].trace,
        "truth": head.truth if verdict.truth is None else verdict.truth,
        "task": head.task,
        "metadata": {
            **head.metadata,
            "num_turns": num_turns,
            "final_status": verdict.final_status,
            "parts": parts,
            **({} if verdict.rewards is None else {"rewards": verdict.rewards}),
        },
        "messages": head.request.get("messages", []) if head.keep_messages else [],
    }


def _ending(results: Sequence[SequenceResult]) -> FinishReason:
    last = results[-1].finish_reason
    cut: list[FinishReason] = [one.finish_reason for one in results if one.finish_reason in CUT_SHORT]
    return cut[-1] if cut and last != "repeat_terminated" else last  # its flag must match the ending
