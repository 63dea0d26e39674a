"""A run over batches, from an idle state to an idle one."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import jax

from xrex.training.config import StepConfig
from xrex.training.state import Batch, PipelineState, StepMetrics


class Steps(Protocol):
    """What a run needs of a `Pipeline`."""

    config: StepConfig

    def start(self, state: PipelineState, batch: Batch) -> PipelineState:
        """See `Pipeline.start`."""

    def step(self, state: PipelineState, next_batch: Batch) -> tuple[PipelineState, StepMetrics]:
        """See `Pipeline.step`."""

    def finish(self, state: PipelineState) -> tuple[PipelineState, StepMetrics]:
        """See `Pipeline.finish`."""


class Run(Iterator[tuple[PipelineState, StepMetrics]]):
    """A run over batches: an iterator over the state and the metrics after each.

    The yielded state may be read, and the loop may be left at any point: go on from the state with
    `step`, `finish` or another `run`. To change it in the middle, set `state`:
    `run.state, result = pipeline.flush(run.state)`.

    Attributes:
      state: the newest state; after an exception, the one to go on from. A batch that it holds
        (`current_batch`) was taken from the source and is trained next.
    """

    def __init__(self, pipeline: Steps, state: PipelineState, batches: Iterable[Batch]) -> None:
        """Use `Pipeline.run`."""
        self.state = state
        self._pipeline = pipeline
        self._steps = self._train(batches)

    def __next__(self) -> tuple[PipelineState, StepMetrics]:
        """Trains on the next batch."""
        return next(self._steps)

    def _train(self, batches: Iterable[Batch]) -> Iterator[tuple[PipelineState, StepMetrics]]:
        pipeline = self._pipeline
        for batch in batches:
            if self.state.current_batch is None:
                self.state = self._whole(pipeline.start(self.state, batch))
            else:
                yield self._advance(pipeline.step(self.state, batch))
        if self.state.current_batch is not None:
            yield self._advance(pipeline.finish(self.state))

    def _advance(
        self, done: tuple[PipelineState, StepMetrics]
    ) -> tuple[PipelineState, StepMetrics]:
        self.state = self._whole(done)[0]
        return done

    def _whole(self, done: Any) -> Any:
        """What a call returned; without donation, once no error of a device can come any more."""
        return done if self._pipeline.config.donate else jax.block_until_ready(done)
