"""Proves, after every start and before serving, that the loaded guard fires.

- A real decode that repeats one token, under rules lowered for the probe, must be ended by the guard.
- Then each rule of the run is shown tokens that break it, on the loaded instance and with its own thresholds.
"""

from __future__ import annotations

from itertools import count, cycle, islice

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import GuardRefused
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.contracts import Backend, SequenceRequest
from sluice.workers.guard.repeat import RepeatTrigger, Rule
from sluice.workers.guard.rules import GuardRules

_RUN = 3  # tokens of the probe
_LOWERED = RepeatTerminateConfig(
    enabled=True, min_new_tokens=1, max_consecutive_token_repeats=_RUN, ngram_size=None, max_object_keys=None
)


async def prove_guard(backend: Backend, config: RepeatTerminateConfig) -> None:
    """Raises GuardRefused unless a guard with exactly these rules is active in the started engine."""
    if not config.enabled:
        return
    facts = backend.facts
    where = f"the {facts.name} engine ({facts.engine_version})"
    if not facts.repeat_terminate:
        raise GuardRefused(f"{where}: repeat_terminate is enabled, but no guard is loaded")
    await _prove_decode(backend, where)
    rules = (await backend.try_guard([])).rules
    if rules.config != config:
        raise GuardRefused(f"{where}: the loaded guard has thresholds {rules.config}, but the run asks for {config}")
    proved = [rule for rule in rules.tokens_needed() if await _prove_rule(backend, rules, rule, where)]
    get_logger().info("repeat guard proved", backend=facts.name, decode="ended a loop", rules=",".join(proved))


async def _prove_decode(backend: Backend, where: str) -> None:
    facts = backend.facts
    token = next(token for token in range(facts.vocab_size) if token not in facts.eos_token_ids)
    output = await backend.decode(
        SequenceRequest(
            seq_key="repeat-guard-probe",
            prompt_token_ids=(token,),
            sampling=SamplingParams(temperature=0, max_new_tokens=2 * _RUN),
            allowed_token_ids=(token,),
            probe_guard=GuardRules(_LOWERED),
        )
    )
    wanted = (RepeatTrigger("consecutive", _RUN), [token] * _RUN + [facts.eos_token_ids[0]])
    if (output.trigger, output.token_ids) != wanted:
        raise GuardRefused(
            f"{where}: the repeat guard is loaded but does not fire: {_RUN} equal tokens gave {output.token_ids}, "
            f"{output.finish_reason}; this worker takes no jobs"
        )


async def _prove_rule(backend: Backend, rules: GuardRules, rule: Rule, where: str) -> bool:
    """False (and a warning) for a rule that no sequence of this engine is long enough to trigger."""
    needed, context = rules.tokens_needed()[rule], backend.facts.context_length
    if needed >= context:
        get_logger().warning(
            "a rule of the repeat guard can never fire", rule=rule, tokens_needed=needed, context_length=context
        )
        return False
    tokens = breaking_tokens(rules, rule)
    wanted, trigger = rules.guard().push_all(tokens), (await backend.try_guard(tokens)).trigger
    if trigger is None or trigger != wanted:
        raise GuardRefused(
            f"{where}: {len(tokens)} tokens that trigger rule {rule} give {trigger} on the loaded guard, not {wanted}"
        )
    return True


def breaking_tokens(rules: GuardRules, rule: Rule) -> list[int]:
    """Tokens that trigger this rule at the last one, unless another rule must trigger first."""
    needed = rules.tokens_needed()[rule]
    if rule == "object_keys":
        return _answers(rules, needed)
    keys = () if rules.keys is None else rules.keys.moves
    a, b, c = islice((token for token in count() if token not in keys), 3)
    if rule == "consecutive":
        return [a] * needed
    size = rules.config.ngram_size or 1
    if rule == "any_period":
        size = max(1, size - 1)  # doesn't divide the block length, so `ngram` doesn't see it
    block = [a, b] * (size // 2) + [c] * (size % 2)  # no two neighbours are equal, not even across blocks
    return list(islice(cycle(block), needed))


def _answers(rules: GuardRules, needed: int) -> list[int]:
    """Answers as the model's tokenizer writes them, one after another, up to the token that completes the rule."""
    keys, most = rules.keys, rules.config.max_object_keys
    if keys is None or most is None or not keys.count(keys.answer):
        raise GuardRefused("no answer with an object key was found to test the loaded guard with")
    tokens, matched, counted = list[int](), 0, 0
    answer = cycle(keys.answer)
    while counted < most or len(tokens) < needed:
        tokens.append(next(answer))
        matched, found = keys.step(tokens[-1], matched)
        counted += found
    return tokens
