"""The values that flags take: from text to a value, or a ValueError that says what is wanted."""

import math
import re
from collections.abc import Callable
from typing import TypeVar

_INT64 = 2**63
_DIGITS = 100
T = TypeVar("T")


def integer(at_least: int | None = None, at_most: int | None = None) -> Callable[[str], int]:
    """The integers of a range, which never exceeds that of int64."""
    low = -_INT64 if at_least is None else at_least
    high = _INT64 - 1 if at_most is None else at_most
    wanted = f"wanted an integer{_range_text(at_least, at_most)}"

    def parse(text: str) -> int:
        # Digits first: int() also reads 4_5.
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise ValueError(wanted)
        # int() refuses thousands of digits in words of its own.
        if len(text) > _DIGITS or not -_INT64 <= int(text) < _INT64:
            raise ValueError(f"{wanted}, and one that 64 bits can hold")
        if not low <= int(text) <= high:
            raise ValueError(wanted)
        return int(text)

    return parse


def number(
    *, at_least: float | None = None, above: float | None = None, below: float | None = None
) -> Callable[[str], float]:
    """The finite numbers of a range."""
    parts = [
        f"{word} {bound:g}"
        for word, bound in (("at least", at_least), ("above", above), ("below", below))
        if bound is not None
    ]
    wanted = " ".join(["wanted a finite number", " and ".join(parts)]).strip()

    def parse(text: str) -> float:
        try:
            value = math.nan if "_" in text else float(text)
        except ValueError:
            value = math.nan
        if (
            not math.isfinite(value)
            or (at_least is not None and value < at_least)
            or (above is not None and value <= above)
            or (below is not None and value >= below)
        ):
            raise ValueError(wanted)
        return value

    return parse


def choice(*values: str) -> Callable[[str], str]:
    """One of some words."""

    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"wanted one of {', '.join(values)}")
        return text

    return parse


def words(what: str) -> Callable[[str], str]:
    """Any text but an empty one; `what` says what it stands for, such as "the name of a file"."""

    def parse(text: str) -> str:
        if not text.strip():
            raise ValueError(f"wanted {what}")
        return text

    return parse


def several(parse_one: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Values with commas between them; what is wrong names the part."""

    def parse(text: str) -> tuple[T, ...]:
        values = []
        for part in text.split(","):
            try:
                values.append(parse_one(part.strip()))
            except ValueError as error:
                raise ValueError(f"{part!r} cannot be used: {error}") from error
        return tuple(values)

    return parse


def switch(text: str) -> bool:
    """Yes or no."""
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise ValueError("wanted true or false")
    return values[text.lower()]


def _range_text(at_least: int | None, at_most: int | None) -> str:
    if at_least is not None and at_most is not None:
        return f" from {at_least} to {at_most}"
    if at_least is not None:
        return f" of at least {at_least}"
    return "" if at_most is None else f" of at most {at_most}"
