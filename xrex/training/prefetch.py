"""Packs and places the next batches in the background, while a step runs."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from xrex.training.state import Batch

# How often a thread that waits looks whether anybody still wants its batches.
_LOOK_SECONDS = 0.2


class PlacedBatch(Batch):
    """A batch whose ids were checked and whose arrays were copied to the mesh."""


class _Item(NamedTuple):
    """What the thread passes on: a batch, an error in its place, or neither at the end."""

    batch: PlacedBatch | None = None
    error: BaseException | None = None


class Prefetch(Iterator[Batch]):
    """The batches of a source, placed ahead of time. Made by `Pipeline.prefetch`.

    An error of the source, or of a batch, is raised where that batch is asked for; batches before
    and behind it are not lost: go on with the same object.
    """

    def __init__(
        self, place: Callable[[Batch], PlacedBatch], batches: Iterable[Batch], size: int
    ) -> None:
        """Use `Pipeline.prefetch`."""
        self._items: queue.Queue[_Item] = queue.Queue(size)
        self._stopped = threading.Event()
        self._ended = False
        # The thread does not hold this object, so that it ends when nobody else does.
        self._thread = threading.Thread(
            target=_fill,
            args=(place, iter(batches), self._items, self._stopped),
            name="xrex-prefetch",
            daemon=True,
        )
        self._thread.start()

    def __next__(self) -> Batch:
        """The next batch; waits until it is placed."""
        if self._ended:
            raise StopIteration
        item = self._items.get()
        if item.error is not None:
            self._ended = not isinstance(item.error, Exception)
            raise item.error
        if item.batch is None:
            self._ended = True
            raise StopIteration
        return item.batch

    def close(self) -> None:
        """Takes nothing more from the source, and waits for the thread to end."""
        self._ended = True
        self._stopped.set()
        self._thread.join()

    def __enter__(self) -> "Prefetch":
        """Closes it at the end of a `with` block."""
        return self

    def __exit__(self, *_: Any) -> None:
        """See `close`."""
        self.close()

    def __del__(self) -> None:
        """Lets the thread end; does not wait for it."""
        self._stopped.set()


def _fill(
    place: Callable[[Batch], PlacedBatch],
    batches: Iterator[Batch],
    items: "queue.Queue[_Item]",
    stopped: threading.Event,
) -> None:
    """The thread: one batch after the other is taken, placed and passed on."""
    is_last = False
    while not (is_last or stopped.is_set()):
        try:
            item = _Item(place(next(batches)))
        except StopIteration:
            item, is_last = _Item(), True
        except Exception as error:
            item = _Item(error=error)
        except BaseException as error:  # Such as SystemExit: who waits must hear of it, too.
            item, is_last = _Item(error=error), True
        while not stopped.is_set():
            try:
                items.put(item, timeout=_LOOK_SECONDS)
                break
            except queue.Full:
                continue
