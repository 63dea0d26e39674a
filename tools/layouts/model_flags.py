"""What a command line says about a model of many tables, an `xrex.Embeddings`."""

from dataclasses import replace
from typing import Any, NamedTuple

import xrex
from tools.common.command import Command, UserError
from tools.common.flag_values import number, several, words
from tools.layouts.layout_flags import LayoutFlags
from xrex.layout.handle import check_layout

# The fields of a layout that a model has too; it makes the others of its tables and features.
SHARED = ("mesh", "table_axis", "data_axis", "num_unique", "num_devices_per_node")


class Refusal(NamedTuple):
    """What the validator said against a layout.

    Attributes:
      message: its text, to the letter.
      notes: why, what to change, and of which table it is.
    """

    message: str
    notes: tuple[str, ...]


def parse_means(text: str) -> dict[str, float]:
    """The numbers that `seen=12.5,liked=3` gives.

    Raises:
      ValueError: it gives none.
    """
    means: dict[str, float] = {}
    for part in text.split(","):
        name, _, mean = (word.strip() for word in part.partition("="))
        try:
            value = number(at_least=0)(mean)
        except ValueError as error:
            raise ValueError(f"{part!r} is not FEATURE=NUMBER, as in seen=12.5,liked=3") from error
        if not name or name in means:
            raise ValueError(f"{part!r} must name a feature, each once")
        means[name] = value
    return means


class ModelFlags:
    """The flags that are for models alone, and those of a layout that change one."""

    def __init__(self, command: Command, layout: LayoutFlags) -> None:
        """Defines the flags."""
        self._command, self._layout = command, layout
        self._mean_ids = command.flag(
            "mean_ids",
            None,
            "How many ids bags have on average: FEATURE=NUMBER,... Of xrex.Embeddings.",
            parse_means,
        )
        self._weighted = command.flag(
            "weighted",
            None,
            "The features whose bags have weights. Of xrex.Embeddings.",
            several(words("names of features, such as seen,liked")),
        )

    def check_unused(self) -> None:
        """Refuses flags of models where there is only a layout.

        Raises:
          UserError: there is one.
        """
        for name in ("mean_ids", "weighted"):
            if self._command.is_given(name):
                raise UserError(
                    f"--{name}: it is for an xrex.Embeddings, which --from_python can name"
                )

    def model(self, base: xrex.Embeddings, unusable: tuple[str, ...]) -> xrex.Embeddings:
        """The model, with the fields that the command line replaces.

        Raises:
          UserError: the command line has a flag of a layout that a model does not have.
          ValueError: the validator refuses what that makes.
        """
        given = self._layout.given()
        for name in (*(name for name in given if name not in SHARED), *unusable):
            if self._command.is_given(name):
                raise UserError(f"--{name}: it is not for an xrex.Embeddings of --from_python")
        return replace(base, **given) if given else base

    def arguments(self) -> dict[str, Any]:
        """What `xrex.embeddings.plan_model.plan_model` is told beside the model."""
        return {"mean_ids": self._mean_ids.value or {}, "weighted": self._weighted.value or ()}


def refusal(error: BaseException | None) -> Refusal | None:
    """What the validator said, if it raised the error; None for any other error, and for none."""
    traceback = None if error is None else error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None or traceback.tb_frame.f_code is not check_layout.__code__:
        return None
    return Refusal(str(error), tuple(getattr(error, "__notes__", ())))
