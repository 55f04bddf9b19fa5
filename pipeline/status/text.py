"""Numbers, durations and waits as text, for every view."""

from __future__ import annotations

from sluice.pipeline.wire.waits import Wait, WaitKind

_WAITS: dict[WaitKind, str] = {
    WaitKind.CREDIT: "credit (sequences, bytes or versions ahead; the trainer frees it, dead letters hold bytes too)",
    WaitKind.BROKER_MEMORY: "memory in the broker, which is full",
    WaitKind.ROLE: "the role {subject}, which another process holds",
    WaitKind.PARTITION: "a partition of results; others hold them all",
    WaitKind.ENGINE: "the engine to load {subject}",
    WaitKind.MODEL: "the model to load from {subject}",
    WaitKind.TOKENIZER: "the tokenizer of {subject}",
    WaitKind.CHECKPOINT: "checkpoint {subject} to load",
    WaitKind.SAVING: "checkpoint {subject} to be on disk",
    WaitKind.FORWARD_PROOF: "the proof of the forward pass",
    WaitKind.WEIGHTS: "weights {subject} to load",
    WaitKind.VERSIONS: "the versions of this run",
    WaitKind.PUBLICATION: "the files of a version",
    WaitKind.JOBS: "jobs (none is ready)",
    WaitKind.PROMPTS: "the prompts of {count} jobs",
    WaitKind.RESULTS: "results from the workers",
    WaitKind.REWARDS: "your reward functions, on {count} sequences",
    WaitKind.BATCHES: "training batches from the consumers",
    WaitKind.IMAGES: "the images of {count} samples",
    WaitKind.SCORE_JOBS: "score jobs (none is ready)",
    WaitKind.SCORES: "score jobs: {count} of {subject}",
    WaitKind.NEXT_VERSION: "the next version to evaluate",
    WaitKind.ANSWERS: "{count} answers to held-out prompts under {subject}",
    WaitKind.REQUESTS: "requests",
    WaitKind.PEER: "{subject}",
    WaitKind.ROLLOUTS: "the rollout server at {subject} ({count} rollouts)",
    WaitKind.DRAIN: "{count} {subject} to finish (draining)",
    WaitKind.ISOLATION: "{count} running sequences to finish: they, or the next ones, run in isolation",
    WaitKind.SHARE: "its turn on the engine, which other runs have",
    WaitKind.OTHER: "{subject}",
}
_BESIDE: dict[WaitKind, str] = {  # appended if there is a count
    WaitKind.WEIGHTS: ", with {count} sequences running",
    WaitKind.BATCHES: "; {count} samples are handed out and hold credit until `publish` or `done`",
}


def wait_text(wait: Wait) -> str:
    """What is waited for, as in "waits for …"."""
    text = _WAITS[wait.kind] + (_BESIDE.get(wait.kind, "") if wait.count else "")
    return text.format(subject=wait.subject, count=wait.count)


def length(seconds: float) -> str:
    """A duration, short."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} d"


def waiting(number: int, one: str, many: str = "") -> str:
    """How many are waiting; empty if none."""
    return f"{counted(number, one, many)} {'waits' if number == 1 else 'wait'}" if number else ""


def counted(number: int, one: str, many: str = "") -> str:
    """A number and its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
