"""Short histories that once went wrong, or could."""

from __future__ import annotations

from sluice.pipeline.queue.types import Claim
from sluice.pipeline.wire.tokens import TokenArray
from tests.factories import decode_job
from tests.property.queue_model.foreign import MAILBOX
from tests.property.queue_model.machine import Machine


def _enqueue(machine: Machine, *sizes: int) -> None:
    machine.enqueue([(n, 0, True) for n in sizes], 0, False)


def _set_apart(machine: Machine) -> None:
    """One job that two workers died over."""
    _enqueue(machine, 1)
    machine.die(0, 1, False)
    machine.die(0, 1, False)


def _one_busy_and_a_suspect(machine: Machine) -> None:
    """Worker 1 holds the first job; two others died over the second."""
    _enqueue(machine, 1)
    _enqueue(machine, 1)
    machine.claim_some(1, 1)
    machine.die(0, 1, False)
    machine.die(0, 1, False)


def a_repeat_after_its_payload_was_lost(machine: Machine) -> None:
    _enqueue(machine, 2)
    machine.lose_payload(0)
    machine.submit([decode_job("m:j0", n=2)])


def an_abort_that_was_cut_off_lets_nobody_else_in(machine: Machine) -> None:
    _one_busy_and_a_suspect(machine)
    machine.give_turn_elsewhere()
    machine.abort_cut_off(1)
    machine.claim_some(1, 2)
    machine.agrees()
    machine.turn_ends()
    machine.claim_some(0, 2)


def an_abort_that_came_too_late(machine: Machine) -> None:
    _enqueue(machine, 1)
    machine.claim_some(0, 1)
    machine.commit_all(0)
    machine.abort_too_late(0)


def an_abort_of_a_foreign_job_whose_payload_ran_out(machine: Machine) -> None:
    machine.put_foreign("job", 2)
    machine.lose_payload(0)
    machine.abort(0)
    machine.claim_some(0, 1)


def a_lease_of_its_own_that_ran_out_brings_no_company(machine: Machine) -> None:
    _set_apart(machine)
    _enqueue(machine, 1)
    machine.claim_some(0, 1)
    machine.forget(0)
    machine.lease_ends(0)
    machine.claim_some(0, 4)
    machine.agrees()
    machine.claim_some(0, 4)


def a_dead_worker_loses_a_job_that_an_abort_has_moved(machine: Machine) -> None:
    _enqueue(machine, 1)
    machine.claim_some(0, 1)
    machine.abort_cut_off(0)
    machine.let_die(machine.owners[0])


def the_blame_of_a_failed_engine_stays(machine: Machine) -> None:
    _enqueue(machine, 1)
    machine.claim_some(0, 1)
    machine.release(0, True, False, "the engine failed")
    machine.renew_late(0, 0)


def the_blame_of_a_live_worker_goes(machine: Machine) -> None:
    _enqueue(machine, 1)
    machine.claim_some(0, 1)
    machine.lease_ends(0)
    machine.claim_some(1, 1)
    machine.agrees()
    machine.renew_all(0)
    assert machine.model.jobs["m:j0"].shared == 0


def a_worker_whose_turn_it_is_returns_what_it_had_not_begun(machine: Machine) -> None:
    _one_busy_and_a_suspect(machine)
    machine.claim_some(1, 1)
    machine.release(0, True, False, "")
    machine.agrees()
    machine.claim_some(1, 1)
    machine.claim_some(0, 1)
    assert machine.owners[1].held["m:j1"].alone
    assert not machine.owners[0].held["m:j0"].alone


def suspects_halve(machine: Machine) -> None:
    _enqueue(machine, 1, 1, 1, 1)
    for together in (4, 4, 2, 1):
        machine.claim_some(0, 9)
        assert len(machine.owners[0].held) == together
        machine.let_die(machine.owners[0])
        machine.agrees()
    assert [job.alone for job in machine.model.jobs.values()] == [1, 1, 2, 2]


def who_got_on_is_cleared(machine: Machine) -> None:
    _set_apart(machine)
    machine.claim_some(0, 1)
    machine.checkpoint(0, 0, "next", 1)
    machine.let_die(machine.owners[0])
    machine.claim_some(0, 1)
    assert not machine.owners[0].held["m:j0"].alone


def a_worker_that_was_told_to_end_blames_nobody(machine: Machine) -> None:
    _enqueue(machine, 2)
    machine.claim_some(0, 4)
    machine.told_to_end(0)
    machine.lease_ends(0)
    machine.claim_some(1, 4)
    machine.let_die(machine.owners[0])
    assert not any(job.shared for job in machine.model.jobs.values())


def plain_calls_use_no_credit(machine: Machine) -> None:
    for _ in range(4):
        machine.enqueue_call(0)
        machine.claim_some(0, 4)
        machine.commit_all(0)
        machine.agrees()
    _enqueue(machine, 3)
    assert machine.model.jobs


def a_half_done_job_dies_with_progress(machine: Machine) -> None:
    _enqueue(machine, 3)
    machine.claim_some(0, 3)
    machine.checkpoint(0, 1, "next", 1)
    machine.checkpoint(0, 1, "next", 1)
    machine.commit_one(0, 1, True)
    machine.agrees()
    machine.let_die(machine.owners[0])
    machine.agrees()
    machine.claim_some(1, 2)
    claim: Claim = machine.owners[1].held["m:j0"]
    assert claim.committed == {0}
    assert len(claim.progress[1].token_ids) == 4
    machine.commit_one(0, 2, False)  # index 1, whose progress is freed
    machine.agrees()
    machine.fail(0, "dead", 1)


def three_deaths_alone_are_the_end(machine: Machine) -> None:
    _set_apart(machine)
    for _ in range(machine.model.most):
        machine.die(0, 1, False)
        machine.agrees()
    assert [row.reason for row in machine.model.dead] == ["worker_deaths"]


def a_caller_is_told_once_of_what_is_stored_and_answered_when_the_job_dies(machine: Machine) -> None:
    _enqueue(machine, 1, 1, 2)  # every third job has a caller
    machine.claim_some(0, 4)
    for how in ("next", "next", "dup", "gap"):
        machine.checkpoint(2, 0, how, 1)
        machine.agrees()
    machine.commit_one(2, 2, True)
    machine.agrees()
    machine.fail(2, "dead", 1)
    assert machine.model.mailbox == ["delta m:j2:0 0", "delta m:j2:0 2", "answer m:j2:1", "answer m:j2:0"]
    assert machine.model.replies == {"m:j2:1": "", "m:j2:0": "invalid_request"}


def an_evaluation_counts_apart_and_is_not_in_the_way_of_credit(machine: Machine) -> None:
    for _ in range(8):  # twice as many sequences as there is credit
        machine.enqueue_evaluation(1, 0)
    machine.agrees()
    assert not machine.model.counts["enqueued"]
    _enqueue(machine, 3)
    assert machine.model.counts["enqueued"] == 3
    machine.claim_some(0, 2)
    machine.commit_all(0)
    machine.agrees()
    assert (machine.model.counts["evaluated"], machine.model.counts["evaluating"]) == (2, 6)
    machine.claim_some(0, 1)
    machine.fail(0, "dead", 1)
    assert not machine.model.counts["dead"]
    assert [reason for *_, reason in machine.model.evaluated if reason] == ["invalid_request"]


def _turn(machine: Machine, rollout_id: str = "mine") -> str:
    """A turn of a rollout in the queue; its job."""
    name = machine.new_name()
    machine.submit([decode_job(name, reply_to=MAILBOX, rollout_id=rollout_id)])
    return name


def _second_turn(machine: Machine, capacity: int = 2) -> str:
    """Worker 0 has decoded the first turn of a rollout, and had room for more; the second one's job."""
    _turn(machine)
    machine.claim_some(0, capacity)
    machine.commit_all(0)
    return _turn(machine)


def a_turn_is_left_to_the_worker_that_has_the_turns_before(machine: Machine) -> None:
    turn = _second_turn(machine)
    machine.claim_some(1, 4)
    assert not machine.owners[1].held
    machine.claim_some(0, 1)
    assert list(machine.owners[0].held) == [turn]


def a_turn_is_left_for_no_longer_than_a_while(machine: Machine) -> None:
    turn = _second_turn(machine)
    machine.has_waited(0, 1)
    machine.claim_some(1, 4)
    assert list(machine.owners[1].held) == [turn]
    machine.commit_all(1)
    _turn(machine)  # it's worker 1 that has the rollout now
    machine.claim_some(0, 4)
    assert not machine.owners[0].held


def a_full_worker_holds_up_no_turn(machine: Machine) -> None:
    turn = _second_turn(machine, capacity=1)
    machine.claim_some(1, 4)
    assert list(machine.owners[1].held) == [turn]


def a_dead_worker_holds_up_no_turn(machine: Machine) -> None:
    turn = _second_turn(machine)
    machine.let_die(machine.owners[0])
    machine.claim_some(1, 4)
    assert list(machine.owners[1].held) == [turn]


def a_worker_that_ends_holds_up_no_turn(machine: Machine) -> None:
    turn = _second_turn(machine)
    machine.told_to_end(0)
    machine.claim_some(1, 4)
    assert list(machine.owners[1].held) == [turn]


def a_worker_that_empties_itself_for_suspects_holds_up_no_turn(machine: Machine) -> None:
    _turn(machine)
    machine.claim_some(0, 2)
    machine.commit_all(0)
    _enqueue(machine, 1)
    machine.claim_some(0, 2)  # it holds one job, and has room
    _enqueue(machine, 1)
    machine.die(1, 1, False)
    machine.die(1, 1, False)
    machine.claim_some(0, 1)
    turn = _turn(machine)
    machine.claim_some(2, 4)  # the suspect
    machine.claim_some(1, 4)
    assert list(machine.owners[1].held) == [turn]


def a_turn_goes_before_what_came_earlier_but_not_for_ever(machine: Machine) -> None:
    _turn(machine)
    machine.claim_some(0, 2)
    machine.commit_all(0)
    first, second = machine.new_name(), machine.new_name()
    machine.submit([decode_job(first), decode_job(second)])
    mine, hurried = _turn(machine), machine.new_name()
    machine.submit([decode_job(hurried, priority=1)])
    machine.system.has_waited(first, 2)
    machine.model.jobs[first].waited = 1
    machine.claim_some(0, 2)
    assert list(machine.owners[0].held) == [hurried, mine]  # another priority is another line
    machine.commit_all(0)
    machine.system.has_waited(first, 10)
    machine.model.jobs[first].waited = 2
    _turn(machine)
    machine.claim_some(0, 1)
    assert list(machine.owners[0].held) == [first]


def a_foreign_job_comes_back_by_its_own_priority(machine: Machine) -> None:
    for kind in ("job", "urgent"):
        machine.put_foreign(kind, 1)
    machine.claim_some(0, 2)
    machine.release(0, True, False, "")
    machine.claim_some(1, 1)
    assert list(machine.owners[1].held) == machine.names[1:]


def a_callers_long_prompt_is_preferred_and_never_left(machine: Machine) -> None:
    prompt = TokenArray(range(1100))

    def ask(length: int) -> str:
        name = machine.new_name()
        job = decode_job(name, reply_to=MAILBOX, messages=[], prompt_token_ids=TokenArray(prompt[:length]))
        machine.submit([job])
        return name

    ask(600)
    machine.claim_some(0, 2)
    machine.commit_all(0)
    other = machine.new_name()
    machine.submit([decode_job(other)])
    longer, longest = ask(700), ask(1100)
    machine.claim_some(0, 1)
    assert list(machine.owners[0].held) == [longer]
    machine.claim_some(1, 3)
    assert list(machine.owners[1].held) == [other, longest]


HISTORIES = [
    a_turn_is_left_to_the_worker_that_has_the_turns_before,
    a_turn_is_left_for_no_longer_than_a_while,
    a_full_worker_holds_up_no_turn,
    a_dead_worker_holds_up_no_turn,
    a_worker_that_ends_holds_up_no_turn,
    a_worker_that_empties_itself_for_suspects_holds_up_no_turn,
    a_turn_goes_before_what_came_earlier_but_not_for_ever,
    a_callers_long_prompt_is_preferred_and_never_left,
    an_evaluation_counts_apart_and_is_not_in_the_way_of_credit,
    a_caller_is_told_once_of_what_is_stored_and_answered_when_the_job_dies,
    a_repeat_after_its_payload_was_lost,
    an_abort_that_was_cut_off_lets_nobody_else_in,
    an_abort_that_came_too_late,
    an_abort_of_a_foreign_job_whose_payload_ran_out,
    a_foreign_job_comes_back_by_its_own_priority,
    a_lease_of_its_own_that_ran_out_brings_no_company,
    a_dead_worker_loses_a_job_that_an_abort_has_moved,
    the_blame_of_a_failed_engine_stays,
    the_blame_of_a_live_worker_goes,
    a_worker_whose_turn_it_is_returns_what_it_had_not_begun,
    suspects_halve,
    who_got_on_is_cleared,
    a_worker_that_was_told_to_end_blames_nobody,
    plain_calls_use_no_credit,
    a_half_done_job_dies_with_progress,
    three_deaths_alone_are_the_end,
]
