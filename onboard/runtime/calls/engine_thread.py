"""One thread that steps an engine while it has requests, for callers in other threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch

from onboard.errors import OnboardError, UsageError
from onboard.runtime.calls.follower import Follower
from onboard.runtime.calls.outputs import Delta
from onboard.runtime.constraints.structured import Matcher
from onboard.runtime.engine import Engine
from onboard.runtime.sampling_params import SamplingParams

Told = Sequence[Delta] | BaseException
"""What a ticket is told after a step: news, or why there will be none."""


@dataclass(eq=False)
class Ticket:
    """One prompt, from its submission to the end of its outputs."""

    prompt: Sequence[int]
    params: SamplingParams
    tell: Callable[[Told], None]
    """Called by the engine's thread; it must not block, and need not wake anybody."""
    inputs: dict[str, Any] | None = None
    priority: int = 0
    generated: Sequence[Sequence[int]] = ()
    """Tokens that the outputs have already; they are told first."""
    grammar: Matcher | None = None
    """What its outputs follow; None: nothing, or the engine's thread makes it of the params."""
    follower: Follower | None = None
    """None until the engine has the request."""


class EngineThread:
    """Owns an engine: nobody else may step it, or submit to it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.running: list[Ticket] = []
        """The prompts whose outputs have not ended; only the thread changes the list."""
        self.when_told: list[Callable[[], None]] = []
        """Called by the thread when all is told that a step brings: who listens is woken then, and
        does not take the interpreter from what is left to tell.
        """
        self._read: deque[tuple[Sequence[int], str | None, Future[torch.Tensor]]] = deque()
        """Prompts whose hidden states are wanted, in order."""
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closing = False
        self._door = Lock()
        """Held while a prompt is queued, so that none comes behind the last look at the queue."""
        self._thread = Thread(target=self._serve, name="onboard-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether prompts are taken."""
        return self._thread.is_alive() and not self._closing

    def submit(self, ticket: Ticket) -> None:
        """Queue a prompt; what becomes of it is told."""
        self._queue(lambda: self._start(ticket))

    def cancel(self, ticket: Ticket) -> None:
        """Cancel what has not ended of a prompt; nothing more is told."""
        self._calls.put(lambda: self._cancel(ticket))

    def hidden_states(self, prompt: Sequence[int], lora: str | None = None) -> Future[torch.Tensor]:
        """Queue a prompt to be read, between two steps and when there is room; return what
        `Engine.hidden_states` will say of it.
        """
        wanted: Future[torch.Tensor] = Future()
        self._queue(lambda: self._read.append((prompt, lora, wanted)))
        return wanted

    def close(self, *, timeout: float | None = None) -> bool:
        """Let the thread end when all outputs have, cancel them after `timeout` seconds; return
        whether they had ended.
        """
        with self._door:
            self._closing = True
        self._calls.put(lambda: None)
        self._thread.join(timeout)
        if not (late := self._thread.is_alive()):
            return True
        self._calls.put(self._cancel_all)
        self._thread.join()
        return not late

    def _queue(self, call: Callable[[], None]) -> None:
        with self._door:
            if self._closing:
                raise UsageError("the model is being closed and takes no more prompts")
            self._calls.put(call)

    def _serve(self) -> None:
        while self.running or self._read or not self._closing or not self._calls.empty():
            self._take_calls()
            if self._read:
                self._read_next()
            if self.running:
                self._step()
            for wake in self.when_told:
                wake()

    def _read_next(self) -> None:
        """Read the first prompt that waits for it; let it wait while running outputs have its
        room.
        """
        prompt, lora, wanted = self._read[0]
        if self.running and not self.engine.can_read(prompt):
            return
        self._read.popleft()
        if not wanted.set_running_or_notify_cancel():
            return
        try:
            wanted.set_result(self.engine.hidden_states(prompt, lora))
        except Exception as error:  # a prompt's own fault, whatever it is, is its caller's alone
            wanted.set_exception(error)

    def _take_calls(self) -> None:
        """Do what callers want; wait for it when there is nothing else to do."""
        wait = not self.running and not self._read and not self._closing
        try:
            while True:
                self._calls.get(block=wait)()
                wait = False
        except Empty:
            return

    def _start(self, ticket: Ticket) -> None:
        try:
            outputs = self.engine.submit(
                ticket.prompt,
                ticket.params,
                ticket.inputs,
                ticket.priority,
                ticket.generated,
                ticket.grammar,
            )
        except Exception as error:  # a prompt's own fault, whatever it is, is its caller's alone
            ticket.tell(error)
            return
        ticket.follower = Follower(outputs, self.engine.texts)
        self.running.append(ticket)
        if ticket.generated:
            self._tell(ticket)

    def _cancel(self, ticket: Ticket) -> None:
        if ticket in self.running:
            self.running.remove(ticket)
            assert ticket.follower is not None
            for output in ticket.follower.outputs:
                self.engine.cancel(output)

    def _cancel_all(self) -> None:
        for *_, wanted in self._read:
            wanted.cancel()
        self._read.clear()
        for ticket in list(self.running):
            self._cancel(ticket)
            ticket.tell(OnboardError("the model was closed before the output had ended"))

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception as error:  # all that run share the step, and the engine's state
            running, self.running = self.running, []
            self.engine.abort()
            for ticket in running:
                ticket.tell(error)
            return
        for ticket in list(self.running):
            self._tell(ticket)

    def _tell(self, ticket: Ticket) -> None:
        assert ticket.follower is not None
        if deltas := list(ticket.follower.deltas()):
            if ticket.follower.finished:
                self.running.remove(ticket)
            ticket.tell(deltas)
