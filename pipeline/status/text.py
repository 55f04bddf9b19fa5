"""What a run waits for, in plain words."""

from __future__ import annotations

from sluice.pipeline.status.snapshot import CreditUse, Snapshot

_MIB = 1 << 20


def condition(now: Snapshot) -> str:
    """The run in a word or two."""
    if now.complete:
        return "complete"
    if any(row.is_alive and not row.is_onlooker for row in now.processes):
        return "running"
    if now.state == "finished":
        return "over, but not complete"
    return "not running" if now.enqueued else "nothing enqueued yet"


def waits(now: Snapshot) -> list[str]:
    """What keeps the run, and then what each live process says of itself."""
    said = [
        f"{row.name} waits for {row.waiting_for}, {length(row.waiting_s or 0)}"
        for row in now.processes
        if row.is_alive and row.waiting_for
    ]
    return [stall.says for stall in now.stalls] + said


def guard(now: Snapshot) -> str:
    """Where the repeat guard is on and what it did in the sequences that are trained; empty where it is off."""
    workers = now.alive("worker")
    watched = sum("repeat_terminate" in row.facts for row in workers)
    if not watched and not now.metrics.get("rollout/repeat_terminate_active"):
        return ""
    ended, saved = guard_counts(now)
    done = f"{counted(ended, 'sequence')} ended, {counted(saved, 'token')} saved"
    return f"on in {watched} of {counted(len(workers), 'worker')}; {done}" if workers else done


def guard_counts(now: Snapshot) -> tuple[int, int]:
    """(sequences that the repeat guard ended, tokens that it saved) among those that are trained."""
    names = ("triggered_sequences", "tokens_saved")
    ended, saved = (int(now.metrics.get(f"total/rollout/repeat_terminate_{name}", 0)) for name in names)
    return ended, saved


def policy(now: Snapshot) -> str:
    """The newest step of a policy loss; empty where there is none."""
    found = {name.removeprefix("policy/"): value for name, value in now.metrics.items() if name.startswith("policy/")}
    if "tokens" not in found:
        return ""
    lag = f"{found.get('version_lag_mean', 0):.1f} versions old, the oldest {found.get('version_lag_max', 0):.0f}"
    left_out = {
        "stale": found.get("stale_tokens", 0),
        "without a proximal logprob": found.get("missing_proximal_tokens", 0),
        "capped": found.get("capped_tokens", 0),
        "floored": found.get("floored_tokens", 0),
    }
    words = [f"{count:,.0f} {name}" for name, count in left_out.items() if count]
    gap = found.get("engine_logprob_gap_max")
    return "; ".join(
        [
            f"reward {found.get('reward_mean', 0):.3f}",
            f"{found['tokens']:,.0f} tokens, {lag}",
            *([f"left out: {', '.join(words)}"] if words else []),
            *([f"trainer and engine differ by {gap:.1e} nats at most"] if gap is not None else []),
        ]
    )


def credit(use: CreditUse) -> str:
    """Used of limit."""
    sequences = f"{use.sequences:,}" + ("" if use.max_sequences is None else f" of {use.max_sequences:,}")
    held = f"{use.bytes / 1024:,.1f} KiB" if use.bytes < _MIB else f"{use.bytes / _MIB:,.1f} MiB"
    return f"{sequences} sequences, {held}" + ("" if use.max_bytes is None else f" of {use.max_bytes // _MIB:,} MiB")


def length(seconds: float) -> str:
    """A length of time, short."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} d"


def waiting(number: int, one: str, many: str = "") -> str:
    """So many of them wait; empty where there are none."""
    return f"{counted(number, one, many)} {'waits' if number == 1 else 'wait'}" if number else ""


def counted(number: int, one: str, many: str = "") -> str:
    """A number and its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
