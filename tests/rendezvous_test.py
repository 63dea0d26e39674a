"""Exchanges of texts between processes that are threads here, over a store that is a dict."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from xrex import rendezvous
from xrex.rendezvous import Late, Rendezvous


class DictTexts:
    """`xrex.compat.SharedTexts` without processes."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._changed = threading.Condition()

    def put(self, name: str, text: str) -> None:
        with self._changed:
            self.texts[name] = text
            self._changed.notify_all()

    def put_first(self, name: str, text: str) -> bool:
        with self._changed:
            if name in self.texts:
                return False
            self.texts[name] = text
            self._changed.notify_all()
            return True

    def get(self, name: str, seconds: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: name in self.texts, seconds)
            return self.texts.get(name)

    def folder(self, path: str) -> dict[str, str]:
        with self._changed:
            found = {name.rpartition("/"): text for name, text in self.texts.items()}
        return {name: text for (folder, _, name), text in found.items() if folder == path}

    def delete_folder(self, path: str) -> None:
        with self._changed:
            for name in [name for name in self.texts if name.startswith(f"{path}/")]:
                del self.texts[name]


def meet(count: int, behave: Callable[[Rendezvous], Any]) -> tuple[list[Any], DictTexts]:
    """What each of `count` processes returns or raises."""
    texts = DictTexts()
    processes = tuple(range(0, 2 * count, 2))

    def run(process: int) -> Any:
        try:
            return behave(Rendezvous(texts, processes, process))  # type: ignore[arg-type]
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, processes)), texts


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_all_see_all_texts_and_old_ones_go(count: int) -> None:
    calls = 3 * rendezvous._KEPT

    def behave(meeting: Rendezvous) -> Any:
        for call in range(calls):
            meeting.publish(f"{call} of {meeting.process}")
            seen = meeting.collect(60)
            assert seen == {process: f"{call} of {process}" for process in meeting.processes}
            assert list(seen) == list(meeting.processes)
        return meeting.number

    seen, texts = meet(count, behave)
    assert seen == [calls] * count
    assert len(texts.texts) <= 2 * count * rendezvous._KEPT


@pytest.mark.parametrize("missing", [0, 2, 4])
def test_a_late_process_is_late_for_everybody(missing: int) -> None:
    gave_up = threading.Barrier(3)

    def behave(meeting: Rendezvous) -> Any:
        late = None
        if meeting.process == missing:
            gave_up.wait(60)
        meeting.publish("")
        try:
            meeting.collect(0.2)
        except Late as error:
            late = error
        if meeting.process != missing:
            gave_up.wait(60)
        meeting.publish("again")
        return late, meeting.collect(60)

    seen, _ = meet(3, behave)
    for late, again in seen:
        assert (late.process, late.seconds) == (missing, 0.2)
        assert late.by in {0, 2, 4} - {missing}
        assert again == {0: "again", 2: "again", 4: "again"}


def test_who_publishes_and_does_not_collect_keeps_nobody_waiting() -> None:
    def behave(meeting: Rendezvous) -> Any:
        meeting.publish("first")
        if meeting.process:
            meeting.collect(60)
        meeting.publish("second")
        return meeting.collect(60)

    seen, _ = meet(2, behave)
    assert seen == [{0: "second", 2: "second"}] * 2


def test_named_texts() -> None:
    def behave(meeting: Rendezvous) -> Any:
        if not meeting.process:
            meeting.put("a", "text")
        return meeting.get("a", 60)

    assert meet(2, behave)[0] == ["text", "text"]
    (error,), _ = meet(1, lambda meeting: meeting.get("a", 0.01))
    assert isinstance(error, TimeoutError)
    assert "no process has put a within 0.01 s" in str(error)
