"""Simulated processes that join a run, and the hub that they dial in to, in virtual time.

A client does what `Connection` does: it asks for calls, carries them out, and dials in again when
the hub does not know it or does not answer. The hub does what `Hub` does with these messages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from paceline.sessions.hub import POLL, SILENCE
from paceline.sessions.seats import Call
from tests.storms.processes import Call as ProcessCall
from tests.storms.processes import Reference, WorkerProcess
from tests.storms.session_weather import Arena, CheckedSeats
from tests.storms.storm import require

ALL_LEFT = "all workers have left"
_LATENCY = 0.002  # seconds from a client to the hub
_LOOK = 1.0  # seconds between two looks at silent clients
_ANSWER = 15.0  # seconds after which a client dials in again
_PATIENCE = SILENCE + _LOOK + 0.5  # seconds in which a silent client is removed
Found = list[Call] | str | None


class SimulatedHub:
    """One life of the hub: passes messages on to its seats, and looks after clients."""

    def __init__(self, world: Arena, number: int) -> None:
        self.world, self.alive, self.ended = world, True, False
        self.seats = CheckedSeats(world, self._wake)
        self.interrupt: Callable[[str], None] = lambda reason: None
        self.left_at = inf  # when it had the run end, since all had left
        self._number, self._dialed = number, 0
        self._polls: dict[str, list[Callable[[], None]]] = {}  # that wait for calls
        self._heard: dict[str, float] = {}
        self._joined, self._since = False, inf
        world.after(_LOOK, self._look)

    def receive(self, message: Callable[[], None]) -> None:
        """Take a message, unless this hub is dead."""
        if self.alive:
            message()

    def dial(self, name: str, reply: Callable[[str], None]) -> None:
        self._dialed += 1
        client = f"{name}#{self._dialed}.{self._number}"
        self._heard[client] = self.world.now
        self.seats.dial(client, self.world.now, name)
        self.seats.check()
        reply(client)

    def leave(self, client: str) -> None:
        self.seats.leave(client, "it has left")
        self.seats.check()

    def poll(self, client: str, reply: Callable[[Found], None]) -> None:
        """Reply with calls, after some seconds with none."""
        found = self._fetch(client)
        if found != []:
            return reply(found)
        waits = [True]

        def again() -> None:
            if waits:
                waits.clear()
                self._polls[client].remove(again)
                reply(self._fetch(client))

        self._polls.setdefault(client, []).append(again)
        self.world.after(POLL, lambda: self.receive(again))

    def _fetch(self, client: str) -> Found:
        if self.ended:
            self.seats.leave(client, "the run has ended")
            return "ended"
        self._heard[client] = self.world.now
        return self.seats.fetch(client, self.world.now)

    def end(self) -> None:
        """Tell all clients that the run has ended."""
        self.ended = True
        for client in list(self._polls):
            self._wake(client)

    def _wake(self, client: str) -> None:
        for again in list(self._polls.get(client, ())):
            self.world.after(0.0, partial(self.receive, again))
        self.world.preempt()

    def _look(self) -> None:
        """Count silent clients as lost, and end a run that all have left."""
        if not self.alive or self.ended:
            return
        now = self.world.now
        for client in self.seats.silent(now, SILENCE):
            quiet = now - self._heard[client]
            require(quiet >= SILENCE, "S5", f"{client} counts as silent after {quiet:.1f} s")
            self.world.faults["silent"] += 1
            self.seats.leave(client, "it gave no sign of life")
        self.seats.check()
        for client in self.seats.clients:
            quiet = now - self._heard[client]
            require(quiet <= _PATIENCE, "S5", f"{client} is silent for {quiet:.0f} s, and there")
        self._joined |= bool(self.seats.clients)
        self._since = inf if self.seats.clients else min(self._since, now)
        if self._joined and now - self._since > SILENCE and self.left_at == inf:
            self.left_at = now
            self.interrupt(ALL_LEFT)
        self.world.after(_LOOK, self._look)


class ClientProcess(WorkerProcess):
    """The process of a client; its death is the client's."""

    def __init__(self, world: Arena, name: str, died: Callable[[], None]) -> None:
        super().__init__(world, name, world.nodes[0])
        self._died = died

    def die(self) -> None:
        if self.alive:
            self.alive = False
            self._died()


class Client:
    """One process of a user, from its start to its death."""

    def __init__(self, crowd: Crowd, name: str) -> None:
        self._crowd, self._world, self.name = crowd, crowd.world, name
        self.process = ClientProcess(self._world, name, self._died)
        self.told = False  # that the run has ended
        self._stopped = False
        self._held: list[Callable[[], None]] = []  # what it does when it is woken up
        self._id, self._asked = "", 0
        self._dial()

    # --- asking ----------------------------------------------------------------------------------

    def _dial(self) -> None:
        self._id = ""
        self._ask(lambda hub, reply: hub.dial(self.name, reply), self._welcomed, _ANSWER)

    def _welcomed(self, id: str) -> None:
        self._id = id
        self._poll()

    def _poll(self) -> None:
        id = self._id
        self._ask(lambda hub, reply: hub.poll(id, reply), self._heard, POLL + SILENCE)

    def _ask(
        self,
        message: Callable[[SimulatedHub, Callable[[Any], None]], None],
        then: Callable[[Any], None],
        timeout: float,
    ) -> None:
        """Send a message, and go on with its reply; without one, dial in again."""
        self._asked += 1
        number = self._asked

        def heard(found: Any) -> None:
            if number == self._asked:
                then(found)

        def reply(found: Any) -> None:
            if not self._world.strikes("unheard"):
                self._world.after(self._way(), partial(self._do, partial(heard, found)))

        def overdue() -> None:
            if number == self._asked and not self.told:
                self._world.faults["redialed"] += 1
                self._dial()

        self._send(lambda hub: message(hub, reply))
        self._world.after(timeout, partial(self._do, overdue))

    def _heard(self, found: Found) -> None:
        if isinstance(found, str):
            self.told = True
            return
        if found is None:
            return self._dial()
        for call in found:
            self._carry_out(call)
        for fault, action in (("stop", self._stop), ("quit", self._leave), ("dies", self._die)):
            if self._world.strikes(fault):
                self._world.after(self._world.rng.uniform(0, POLL), partial(self._do, action))
        self._poll()

    # --- working ---------------------------------------------------------------------------------

    def _carry_out(self, call: Call) -> None:
        if call.method == "abandon":
            self.process.inside.abandon(*call.arguments)
            return
        reference, id = Reference(self._world), self._id

        def done(future: Any) -> None:
            self._do(partial(self._answer, id, call.number, future))

        reference.add_done_callback(done)
        self.process.receive(ProcessCall(call.method, call.arguments, [reference]))

    def _answer(self, id: str, number: int, future: Any) -> None:
        """Answer a call; it may have dialed in again since, and still answer as the old client."""
        if id != self._id:
            self._world.faults["old id"] += 1
        error = future.exception(timeout=0)
        reply = None if error is not None else future.result(timeout=0)
        cause = getattr(error, "cause", error)
        self._send(lambda hub: hub.seats.answer(id, number, reply, cause))

    # --- the process -----------------------------------------------------------------------------

    def _do(self, action: Callable[[], None]) -> None:
        """Do something unless this process is dead; if it is paused, when it is woken up."""
        if self._stopped:
            self._held.append(action)
        elif self.process.alive:
            action()

    def _send(self, message: Callable[[SimulatedHub], None]) -> None:
        """Send a message to the hub of this moment; if it dies meanwhile, the message is lost."""
        hub = self._crowd.hub
        self._world.after(self._way(), lambda: hub.receive(partial(message, hub)))

    def _way(self) -> float:
        late = self._world.strikes("delayed")
        return self._world.rng.uniform(0, 4) if late else _LATENCY

    def _stop(self) -> None:
        self._stopped = True
        self._world.after(self._world.rng.uniform(0.2, 4) * SILENCE, self._wake_up)

    def _wake_up(self) -> None:
        self._stopped = False
        held, self._held = self._held, []
        for action in held:
            self._do(action)

    def _leave(self) -> None:
        id = self._id
        self._send(lambda hub: hub.leave(id))
        self.process.die()

    def _die(self) -> None:
        self.process.die()

    def _died(self) -> None:
        self._crowd.left(self)


class Crowd:
    """All clients. Whoever dies or leaves is started again later, unless it is a mere visitor.

    size: clients at a time, at most; the first `stay` of them always come again.
    """

    def __init__(self, world: Arena, size: int, stay: int) -> None:
        self.world, self.hub = world, SimulatedHub(world, 0)
        self._lives, self._stay = 1, stay
        self.clients: dict[str, Client] = {}
        for index in range(size):
            name = f"c{index}"
            world.pace[name] = world.rng.choice((0.5, 1.0, 1.0, 1.0, 4.0))
            late = 200.0 if world.rng.random() < 0.2 else 3.0
            world.after(world.rng.uniform(0, late), partial(self._join, name))

    def _join(self, name: str) -> None:
        self.clients[name] = Client(self, name)

    def left(self, client: Client) -> None:
        if int(client.name[1:]) >= self._stay and self.world.rng.random() < 0.5:
            return
        away = 40.0 if self.world.rng.random() < 0.5 else 3.0
        self.world.after(self.world.rng.uniform(0.5, away), partial(self._join, client.name))

    def new_hub(self) -> None:
        """Have the hub die, and be started again."""
        self.hub.alive = False
        self.hub = SimulatedHub(self.world, self._lives)
        self._lives += 1

    def end(self) -> None:
        """End the run, and see that all clients hear of it."""
        self.hub.end()
        until = self.world.now + 120.0
        while self._ignorant() and self.world.advance(until):
            pass
        require(not self._ignorant(), "S7", f"{self._ignorant()} have not heard of the end")

    def _ignorant(self) -> list[str]:
        clients = self.clients.values()
        return [client.name for client in clients if client.process.alive and not client.told]
