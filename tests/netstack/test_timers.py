"""When flows are called, and what is kept of them."""

from __future__ import annotations

from math import inf

from agent_box.netstack.poller import Poller
from agent_box.netstack.timers import STEPS, Timers
from agent_box.netstack.wire import Timed


class Waiting:
    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.armed = inf


class Play:
    def __init__(self) -> None:
        self.now = 1000.0
        self.due: list[Timed] = []
        self.poller = Poller(lambda: self.now)
        self.timers = Timers(self.poller, self.due.append)

    def at(self, when: float) -> list[Timed]:
        """Who is called then."""
        self.now = when
        self.poller.tick()
        self.poller.poll()
        found = self.due[:]
        self.due.clear()
        return found


def test_called_once_and_never_early() -> None:
    play = Play()
    flows = [Waiting(1001 + n / 1000) for n in range(100)]
    for flow in flows:
        play.timers.arm(flow)
    for flow in flows:
        early = play.at(flow.deadline - 1e-6)
        assert flow not in early and all(other.deadline <= play.now for other in early)
        assert all(other.armed == inf for other in early)
    play.at(flows[-1].deadline + 1 / STEPS)
    assert all(flow.armed == inf for flow in flows)
    assert play.at(2000) == []
    play.poller.close()


def test_no_later_than_a_step() -> None:
    play = Play()
    for n in range(50):
        flow = Waiting(play.now + 1 + n / 77)
        play.timers.arm(flow)
        assert play.at(flow.deadline + 1 / STEPS) == [flow]
    play.poller.close()


def test_the_last_word_counts() -> None:
    play = Play()
    flow = Waiting(1008.0)
    play.timers.arm(flow)
    flow.deadline = 1001.0
    play.timers.arm(flow)
    play.timers.arm(flow)
    assert play.at(1001.1) == [flow]
    assert play.at(1009) == []
    flow.deadline = 1009.0  # is now
    play.timers.arm(flow)
    assert play.at(1009) == [flow]
    play.poller.close()


def test_nothing_is_kept_of_a_flow_that_ended() -> None:
    play = Play()
    flows = [Waiting(1001.0), Waiting(1001.0)]
    for flow in flows:
        play.timers.arm(flow)
    play.timers.disarm(flows[0])
    play.timers.disarm(flows[0])
    assert play.at(1002) == flows[1:]
    play.poller.close()


def test_one_that_ends_while_others_are_called() -> None:
    play = Play()
    flows = [Waiting(1001.0), Waiting(1001.0)]
    timers = Timers(play.poller, lambda flow: [timers.disarm(other) for other in flows] and None)
    for flow in flows:
        timers.arm(flow)
    play.at(1002)
    assert all(flow.armed == inf for flow in flows)
    play.poller.close()
