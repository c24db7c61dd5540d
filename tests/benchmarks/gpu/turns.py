"""Processes that take turns on one device.

Every network has a process of its own, so that all of them compile at once and none can take the
others with it. The driver lets one at a time run, and goes round: whatever the machine does meets
all alike.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch


class WorkerError(RuntimeError):
    """A process failed, or did not answer in time."""


class Channel:
    """The end of a process: it replies once when it is ready, then once to every request."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def reply(self, value: Any = None) -> None:
        self.connection.send(("ok", value))

    def reply_error(self) -> None:
        self.connection.send(("error", traceback.format_exc()[-3000:]))

    def request(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next request, a name and arguments."""
        return self.connection.recv()


Body = Callable[[Channel], None]


class Worker:
    """A process that runs the body of a name, `make_bodies(tiny)[name](channel)`.

    Args:
        name: of the body.
        make_bodies: a function of a module, as it may be pickled.
        tiny: its argument.
        method: "fork", which shares the imports of the driver, or "spawn".
    """

    def __init__(
        self, name: str, make_bodies: Callable[[bool], dict[str, Body]], tiny: bool, method: str
    ) -> None:
        self.name, self._is_ready = name, False
        self.first_reply: Any = None
        context = multiprocessing.get_context(method)
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_run, args=(name, make_bodies, tiny, other))
        self._process.start()
        other.close()

    def wait(self, seconds: float) -> None:
        """Wait until the process is ready. Raises WorkerError if it is not by then, or failed."""
        if not self._is_ready:
            self.first_reply = self._receive(seconds)
            self._is_ready = True

    def call(self, seconds: float, name: str, *args: Any) -> Any:
        """The reply to a request, which must come within some seconds."""
        self._connection.send((name, args))
        return self._receive(seconds)

    def _receive(self, seconds: float) -> Any:
        try:
            if not self._connection.poll(max(seconds, 0)):
                raise WorkerError(f"{self.name}: no answer in {seconds:.0f} s")
            status, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerError(f"{self.name}: the process ended") from error
        if status == "error":
            raise WorkerError(f"{self.name}: {value}")
        return value

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def can_fork() -> bool:
    """Whether a fork of this process can use the device, as no import has used it before."""
    process = multiprocessing.get_context("fork").Process(target=_use_device)
    process.start()
    process.join(60)
    return process.exitcode == 0


def _use_device() -> None:
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")


def _run(
    name: str, make_bodies: Callable[[bool], dict[str, Body]], tiny: bool, connection: Connection
) -> None:
    channel = Channel(connection)
    try:
        make_bodies(tiny)[name](channel)
    except BaseException:  # whatever it is, the driver goes on
        channel.reply_error()
    os._exit(0)  # what is left of threads and compilers must not keep the process
