"""Processes exchange short texts, and none of them waits for another beyond a deadline.

Each process has one place to write to in each exchange, and the first text that is written there
stays. A process that has waited long enough writes into the place of the one that is missing that
it is late. So all of them see the same: it came in time for every one of them, or for none.
"""

import dataclasses
import functools
import hashlib
import json
import time
from typing import Any

import jax

from xrex.compat import SharedTexts, distributed_client

# Ctrl-C is seen between two looks.
_LOOK_SECONDS = 5.0
# Exchanges whose texts are deleted together.
_KEPT = 256


@dataclasses.dataclass
class Late(Exception):
    """A process did not come in time.

    Attributes:
      process: which.
      by: the process that gave up waiting for it.
      seconds: how long that one had waited.
    """

    process: int
    by: int
    seconds: float


class Rendezvous:
    """Exchanges between the same processes, which all of them make in the same order."""

    def __init__(self, texts: SharedTexts, processes: tuple[int, ...], process: int):
        """Args: where the texts lie; the processes that exchange, in order; this one of them."""
        self.processes, self.process = processes, process
        self._texts = texts
        # A digest: the name of a thousand processes would be long.
        group = hashlib.sha256(repr(processes).encode()).hexdigest()[:16]
        self._root = f"xrex/rendezvous/{group}"
        self._own: dict[int, str] = {}  # what this process published, if it was in time
        self.number = 0  # of the exchange that is going on, or was the last

    def put(self, name: str, text: str) -> None:
        """Lays a text where the other processes can `get` it, for good."""
        self._texts.put(f"{self._root}/named/{name}", text)

    def get(self, name: str, seconds: float) -> str:
        """Returns what a process has `put`, now or within `seconds`."""
        text = self._texts.get(f"{self._root}/named/{name}", seconds)
        if text is None:
            raise TimeoutError(f"no process has put {name} within {seconds:g} s")
        return text

    def publish(self, text: str) -> None:
        """Begins the next exchange with this process's text. Does not wait."""
        self.number += 1
        text = "=" + text
        came_in_time = self._texts.put_first(self._place(self.process), text)
        self._own = {self.process: text} if came_in_time else {}

    def collect(self, seconds: float) -> dict[int, str]:
        """Returns the texts of all processes, in their order, once all have published.

        Args:
          seconds: how long this process waits for the others, together.

        Raises:
          Late: a process did not come in time, for this process or for another; it is raised in
            every process of the exchange, the late one included.
        """
        deadline = time.monotonic() + seconds
        texts = dict(self._own)
        for process in self.processes:
            if process in texts:
                continue
            texts[process] = self._wait_for(process, deadline, seconds)
            if len(self.processes) - len(texts) > 1:  # one look at all who have come
                texts |= {
                    int(name): text for name, text in self._texts.folder(self._folder()).items()
                }
        self._delete_old()
        for process in self.processes:
            if not texts[process].startswith("="):
                raise Late(process, **json.loads(texts[process]))
        return {process: texts[process][1:] for process in self.processes}

    def _wait_for(self, process: int, deadline: float, seconds: float) -> str:
        """Returns the text in a process's place; at the deadline that of its being late."""
        place = self._place(process)
        while (left := deadline - time.monotonic()) > 0:
            text = self._texts.get(place, min(left, _LOOK_SECONDS))
            if text is not None:
                return text
        late = json.dumps({"by": self.process, "seconds": seconds})
        if self._texts.put_first(place, late):
            return late
        return self._texts.get(place, seconds) or late

    def _folder(self) -> str:
        return f"{self._root}/{self.number // _KEPT}/{self.number}"

    def _place(self, process: int) -> str:
        return f"{self._folder()}/{process}"

    def _delete_old(self) -> None:
        """Deletes a block of old texts: who came to this exchange has read all of earlier ones."""
        block, place = divmod(self.number, _KEPT)
        if place == 0 and self.process == self.processes[0]:
            self._texts.delete_folder(f"{self._root}/{block - 1}")


def rendezvous_of(processes: tuple[int, ...]) -> Rendezvous:
    """Returns the rendezvous of these processes, of which this is one: always the same object.

    Raises:
      RuntimeError: `jax.distributed` was not initialized.
    """
    client = distributed_client()
    if client is None:
        error = RuntimeError(
            f"processes {list(processes)} cannot agree on a call: jax.distributed is not "
            "initialized in this process."
        )
        error.add_note("Call jax.distributed.initialize() in every process, before JAX is used.")
        raise error
    return _rendezvous(client, processes)


# The count of exchanges belongs to the processes, not to a caller: all callers share it. A new
# jax.distributed has a new client, and counts from the start.
@functools.lru_cache(maxsize=64)
def _rendezvous(client: Any, processes: tuple[int, ...]) -> Rendezvous:
    return Rendezvous(SharedTexts(client), processes, jax.process_index())
