"""Which implementation is chosen, and what the kernels refuse."""

import jax.numpy as jnp
import pytest

from pallas_kernels import api, gather_rows_mgpu, segment_sum_mgpu, update_rows_mgpu

H100 = {"platform": "gpu", "compute_capability": "9.0"}


@pytest.mark.parametrize(
    ("where", "shard_width", "chosen"),
    [
        (H100, 64, "mosaic_gpu"),
        (H100, None, "mosaic_gpu"),
        ({"platform": "cuda", "compute_capability": "10.0"}, 8, "mosaic_gpu"),
        (H100, 12, "reference"),
        ({"platform": "gpu", "compute_capability": "8.9"}, 64, "reference"),
        ({"platform": "gpu", "compute_capability": "gfx942"}, 64, "reference"),
        ({"platform": "gpu", "compute_capability": None}, 64, "reference"),
        ({"platform": "cpu", "compute_capability": None}, 64, "reference"),
        ({"platform": "tpu", "compute_capability": None}, 64, "reference"),
    ],
)
def test_auto_takes_what_runs(where, shard_width, chosen):
    choice = api.choose("auto", **where, shard_width=shard_width)
    assert choice.implementation == chosen
    assert choice.reason


@pytest.mark.parametrize(
    ("where", "shard_width", "missing"),
    [
        ({"platform": "cpu"}, 64, "platform 'cpu'"),
        ({"platform": "gpu", "compute_capability": "8.0"}, 64, "9.0 or newer, not 8.0"),
        ({"platform": "abstract"}, 64, "platform 'abstract'"),
        (H100, 6, "a multiple of 4 columns per shard, not of 6"),
    ],
)
def test_an_explicit_choice_is_refused_with_what_is_missing(where, shard_width, missing):
    with pytest.raises(NotImplementedError, match=missing):
        api.choose("mosaic_gpu", **where, shard_width=shard_width)


def test_an_explicit_choice_is_taken_where_it_may_run():
    assert api.choose("mosaic_gpu", **H100, shard_width=12).reason == "asked for"
    assert api.choose("reference", **H100).implementation == "reference"


def test_an_unknown_name_is_the_callers_mistake():
    with pytest.raises(ValueError, match="implementation='triton' is not known"):
        api.choose("triton", **H100)


@pytest.mark.parametrize(
    ("width", "dtype", "message"),
    [
        (4, "bfloat16", "a row of 4 x bfloat16 is 8 bytes"),
        (6, "float32", "a row of 6 x float32 is 24 bytes"),
        (8, "float16", "not float16"),
    ],
)
def test_kernels_refuse_rows_that_they_cannot_copy(width, dtype, message):
    table, ids = jnp.zeros((4, width), dtype), jnp.zeros((2,), jnp.int32)
    with pytest.raises(NotImplementedError, match=message):
        gather_rows_mgpu.gather_rows(table, ids)
    with pytest.raises(NotImplementedError, match=message):
        segment_sum_mgpu.segment_sum(table[:2], ids, 2, dtype=dtype)
    with pytest.raises(NotImplementedError, match=message):
        update_rows_mgpu.update_rows((table,), ids, (), (), lambda rows, operands, scalars: rows)


def test_tunings_must_fit():
    table, ids = jnp.zeros((4, 64), jnp.float32), jnp.zeros((2,), jnp.int32)
    gather = gather_rows_mgpu.GatherTuning(6, 1)
    with pytest.raises(ValueError, match="positive multiple of 4"):
        gather_rows_mgpu.gather_rows(table, ids, tuning=gather)
    update = update_rows_mgpu.UpdateTuning(4, 1)
    with pytest.raises(ValueError, match="positive multiple of 8"):
        update_rows_mgpu.update_rows((table,), ids, (), (), lambda r, o, s: r, tuning=update)
    segment_sum = segment_sum_mgpu.SegmentSumTuning(16, 3)
    with pytest.raises(ValueError, match="splits must divide the width"):
        segment_sum_mgpu.segment_sum(table[:2], ids, 2, dtype="float32", tuning=segment_sum)


@pytest.mark.parametrize("width", [4, 8, 12, 24, 64, 100, 128, 256, 1000, 4096, 8192, 1028 * 4])
@pytest.mark.parametrize("n", [1, 1000, 10**6])
def test_chosen_tunings_fit_any_row_of_a_multiple_of_16_bytes(width, n):
    gather = gather_rows_mgpu.GatherTuning.choose(n, width, "float32")
    update = update_rows_mgpu.UpdateTuning.choose(n, width, ["float32"] * 3, ["float32"])
    segment_sum = segment_sum_mgpu.SegmentSumTuning.choose(width)
    for tuning, bytes_a_value, limit in ((gather, 4, 64), (update, 28, 96), (segment_sum, 12, 64)):
        assert width % tuning.splits == 0
        assert tuning.rows * (width // tuning.splits) * bytes_a_value <= limit * 1024
    assert gather.rows % 4 == 0


def test_an_update_is_cut_evenly_where_it_can_be():
    # 96 rows fit a block: 64 are taken, and neither ids nor step sizes are copied.
    assert update_rows_mgpu.UpdateTuning.choose(65536, 64, ["bfloat16"], ["float32"]).rows == 64
    # No number above 48 divides a prime.
    assert update_rows_mgpu.UpdateTuning.choose(65537, 64, ["bfloat16"], ["float32"]).rows == 96
