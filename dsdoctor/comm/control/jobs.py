"""What a rank does for an order: what is short in a thread, an exchange in a data process. Polled, so that it can be stopped."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from dsdoctor.comm.collectives.nccl_log import relevant_lines
from dsdoctor.comm.control.fork_server import Data
from dsdoctor.comm.control.limits_reached import Limits, limits_now, what_else, why_ended
from dsdoctor.comm.control.messages import Do, ExchangeResult, RankAnswer, RankOrder
from dsdoctor.comm.models import CommSettings
from dsdoctor.comm.results import Speeds, Stuck
from dsdoctor.core.processes import state_of
from dsdoctor.ranks.flight_recorder import flight_file, read_recorded

STACK_TIME = 0.3
TAIL = 5.0
"""Seconds a data process may take beyond its order before its own rank ends it."""


class ThreadJob:
    """Work in a thread, which is left to itself when it has to stop."""

    step = 0

    def __init__(self, rank: int, work: Callable[[], RankAnswer]) -> None:
        self._rank, self._answers = rank, list[RankAnswer]()
        threading.Thread(target=lambda: self._answers.append(work()), daemon=True).start()

    def poll(self) -> RankAnswer | None:
        """The answer, once there is one."""
        return self._answers[0] if self._answers else None

    def stop(self) -> RankAnswer:
        """The answer; an empty one where the work has not ended."""
        return self.poll() or RankAnswer(rank=self._rank)


class RunJob:
    """An exchange in a data process, a fresh one or the one that is in the group already."""

    def __init__(self, rank: int, data: Data, order: RankOrder, settings: CommSettings, limits: Limits) -> None:
        self._rank, self._data, self._seconds, self._limits = rank, data, order.seconds, limits
        self._began = time.monotonic()
        self._error: str | None = None
        self._raised_in: tuple[str, ...] = ()
        self._result: ExchangeResult | None = None
        self._speeds: Speeds | None = None
        data.do(Do(phase=order.phase, mode=settings.mode, seconds=order.seconds))

    @property
    def step(self) -> int:
        """The number of the exchange it is in."""
        return self._data.step

    def poll(self) -> RankAnswer | None:
        """The result, or how it ended without one."""
        for message in self._data.messages():
            self._result = message.result or self._result
            self._speeds = message.speeds or self._speeds
            if message.error:
                self._error, self._raised_in = message.error, message.stack
        if self._result:
            return self._answer(result=self._result)
        if self._error or self._data.ended():
            if self._error and not self._data.ended():
                # its flight recorder is written for who looks at it later
                self._data.ask_stack()
                time.sleep(STACK_TIME)
            return self._answer(stuck=self._stuck(self._raised_in))
        return self.stop() if self._age() > self._seconds + TAIL else None

    def stop(self) -> RankAnswer:
        """Where it is, with its stack; the process is killed."""
        answer = None if self._age() > self._seconds + TAIL else self.poll()
        if answer:
            return answer
        state, ended = state_of(self._data.pid), self._data.ended()
        self._data.ask_stack()
        time.sleep(STACK_TIME)
        # what asking did to the process is not what it died of
        stuck = replace(self._stuck(self._data.stack(), state), ended=ended)
        self._data.kill()
        return self._answer(stuck=stuck)

    def _answer(self, *, result: ExchangeResult | None = None, stuck: Stuck | None = None) -> RankAnswer:
        nccl = relevant_lines(self._data.folder, self._data.pid)
        return RankAnswer(
            rank=self._rank,
            result=result,
            stuck=stuck,
            left_out=self._data.left_out,
            speeds=self._speeds,
            nccl=nccl,
            process=self._data.pid,
        )

    def _stuck(self, stack: tuple[str, ...], state: str = "") -> Stuck:
        recorded = read_recorded(flight_file(self._data.folder, self._data.pid))
        ended = self._data.ended()
        now = limits_now() if ended or self._error else self._limits
        return Stuck(
            rank=self._rank,
            at=self._data.at,
            step=self._data.step,
            seconds=self._age(),
            process=state or state_of(self._data.pid),
            ended=ended,
            error=self._error,
            stack=stack,
            sequence=recorded.sequence if recorded else None,
            operation=f"{recorded.operation} of {recorded.size or '?'}" if recorded else "",
            quiet=min(time.monotonic() - self._data.moved, self._age()),
            cause=why_ended(self._limits, now, ended=ended, error=self._error),
            perhaps=what_else(self._limits, now, ended=ended),
        )

    def _age(self) -> float:
        return time.monotonic() - self._began


Job = ThreadJob | RunJob
