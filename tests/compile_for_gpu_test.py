"""Kernels and training steps compiled for eight H100s on a machine without any."""

import collections
import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import gather_rows_mgpu, segment_sum_mgpu, update_rows_mgpu
from tests import donating_programs
from tests import kernel_cases as cases
from tools import compile_for_gpu
from tools.gpu import compiled_program, program_text, programs, topology

OBSTACLE = topology.missing()
pytestmark = [
    pytest.mark.compile_gpu,
    pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE)),
    # XLA says so where it would ask a GPU how much scratch memory a sort needs.
    pytest.mark.filterwarnings("ignore:Missing deviceless CUB"),
]


@functools.cache
def mesh(gpus=8):
    devices = topology.gpu_devices(topology.TARGETS["h100"], gpus)
    return Mesh(np.array(devices), ("x",))


def compiled(lowered):
    """The report of a program, whose kernels must neither spill registers nor use tensor maps.

    Copies by tensor map need addresses in shared memory that are multiples of 128 bytes, which a
    row's is not. No interpreter knows that, nor does ptxas.
    """
    with tempfile.TemporaryDirectory() as folder:
        with compiled_program.ptxas_usage(keep=folder) as usages:
            program = lowered().compile()
        assert len(list(Path(folder).glob("*.ptx"))) == len(usages)
        for file in Path(folder).glob("*.ptx"):
            assert "cp.async.bulk.tensor" not in file.read_text(), file.name
    for usage in usages:
        assert usage.spilled_bytes == 0, usage
    return compiled_program.read(program), usages


def compiled_kernels(lowered):
    """`compiled` for kernels that no test compiled before: those are not dumped again."""
    report, usages = compiled(lowered)
    assert bool(usages) == bool(report.kernels)
    return report


# The narrowest and the widest rows, and some between, of each type.
FEW_WIDTHS = (4, 8, 32, 128, 256)


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(w, "bfloat16") for w in (8, 16, 32, 64, 128, 256) if w in FEW_WIDTHS or cases.THOROUGH]
    + [(w, "float32") for w in (4, 8, 16, 32, 64, 128) if w in FEW_WIDTHS or cases.THOROUGH],
)
def test_kernels_compile_at_every_width(width, dtype):
    # 2^31 elements and more, where a row number times a width overflows 32 bits.
    vocab = 2**32 // width if (width, dtype) == (256, "bfloat16") else 10_000
    shape = programs.KernelShape(width, dtype, vocab=vocab, tokens=300, segments=200)
    for program in programs.kernel_programs(mesh(), shape):
        report, usages = compiled(program.lower)
        assert usages
        assert {kernel.name for kernel in report.kernels} == {program.name.split()[0]}
        assert not report.collectives
        if program.donated:
            table_bytes = vocab * width * jnp.dtype(dtype).itemsize
            assert report.memory.aliased == table_bytes
            assert not report.copies(at_least=table_bytes)
            assert report.memory.temporary < table_bytes


def as_shapes(arguments):
    return programs.shapes(mesh(1), jax.tree.map(jnp.asarray, arguments))


@pytest.mark.parametrize("case", cases.GATHERS, ids=cases.name)
def test_interpreted_gathers_compile(case):
    function = functools.partial(gather_rows_mgpu.gather_rows, tuning=case.tuning)
    compiled_kernels(lambda: jax.jit(function).lower(*as_shapes(cases.gather_arguments(case, 0))))


@pytest.mark.parametrize("case", cases.UPDATES, ids=cases.name)
def test_interpreted_updates_compile_in_place(case):
    rule = cases.rule(case.rule, case.dtype)
    function = functools.partial(update_rows_mgpu.update_rows, fn=rule.function, tuning=case.tuning)
    arguments = as_shapes(cases.update_arguments(case, 0))
    report = compiled_kernels(lambda: jax.jit(function, donate_argnums=0).lower(*arguments))
    assert report.memory.aliased == sum(t.size * t.dtype.itemsize for t in arguments[0])


@pytest.mark.parametrize("case", cases.SEGMENT_SUMS, ids=cases.name)
def test_interpreted_segment_sums_compile(case):
    function = functools.partial(
        segment_sum_mgpu.segment_sum,
        num_segments=case.segments,
        dtype=case.dtype,
        tuning=case.tuning,
    )
    compiled_kernels(
        lambda: jax.jit(function).lower(*as_shapes(cases.segment_sum_arguments(case, 0)))
    )


def step_shape(staleness=1):
    layout = programs.whole_mesh_layout(mesh(), tokens_per_batch=4096, emb_width=512)
    return programs.StepShape(layout, vocab=1_000_000, staleness=staleness)


def table_bytes(step):
    return step.vocab * step.layout.emb_width * jnp.dtype(step.dtype).itemsize // mesh().size


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_step_updates_the_table_in_place(staleness):
    step = step_shape(staleness)
    assert programs.step_handle(step).implementation == "mosaic_gpu"
    report, _ = compiled(lambda: programs.lower_step(step))
    assert {kernel.name for kernel in report.kernels} == {
        "gather_rows",
        "segment_sum",
        "update_rows",
    }
    # The first outputs are the state: the table, and what the rule holds for each of its rows.
    assert report.memory.aliased > table_bytes(step) + 4 * step.vocab
    for output in range(2):
        assert f"{{{output}}}: ({output}, " in report.aliases
    assert not report.copies(at_least=4 * step.vocab)
    assert report.memory.temporary < table_bytes(step)
    kinds = {c.kind for c in report.collectives if c.is_asynchronous}
    assert kinds >= {"all-gather", "all-to-all"}


def test_the_embedding_part_stays_within_the_arena():
    """Lookup and update alone need at most what is said of them, and a tenth."""
    import xrex

    step = step_shape()
    handle = programs.step_handle(step)
    rule = xrex.RowwiseAdagrad(learning_rate=0.1)
    rows = PartitionSpec(None, "x")

    def shape(*size, dtype, spec=()):
        return programs.shapes(mesh(), jax.ShapeDtypeStruct(size, dtype), *spec)

    tokens, width = handle.tokens_per_batch, handle.emb_width
    table = shape(step.vocab, width, dtype=step.dtype, spec=rows)
    state = programs.shapes(mesh(), jax.eval_shape(lambda: rule.init(step.vocab)))
    ids = shape(tokens, dtype=jnp.int32, spec=("x",))
    update = xrex.GradientUpdate(
        unique_tokens=shape(handle.num_unique, dtype=jnp.int32),
        grads=shape(tokens, width, dtype=step.dtype, spec=("x", None)),
        segment_ids=ids,
        pending=shape(dtype=bool),
    )

    def lookup(ids, table):
        return xrex.lookup_done(handle, xrex.lookup_start(handle, ids, table))

    def apply(update, table, state):
        table, state, pin = xrex.update_start(handle, rule, update, table, state)
        return table, state, xrex.update_done(handle, pin)

    arena = (
        8 * tokens
        + 4 * handle.tokens_per_rank * width * jnp.dtype(step.dtype).itemsize
        + 4 * handle.num_unique * handle.shard_width
        + 4 * (handle.num_unique + 1)
    )
    looked_up, _ = compiled(lambda: jax.jit(lookup).lower(ids, table))
    updated, _ = compiled(lambda: jax.jit(apply, donate_argnums=(1, 2)).lower(update, table, state))
    assert updated.memory.aliased > table_bytes(step)
    assert looked_up.memory.temporary + updated.memory.temporary <= 1.1 * arena


def model_with_bags():
    """A pipeline of four tables and two bags, and shapes of a state that holds a weighted batch."""
    import xrex

    rules = [xrex.RowwiseAdagrad(learning_rate=0.1 * (k + 1)) for k in range(4)]
    embeddings = xrex.Embeddings(
        mesh(),
        tables={f"t{k}": xrex.Table(vocab=10**5, width=512, rule=rules[k]) for k in range(4)},
        features={f"f{k}": xrex.Feature(f"t{k}") for k in range(4)}
        | {f"b{k}": xrex.Feature(f"t{k}", max_ids=8, combiner="mean") for k in range(2)},
        batch_size=1024,
        table_axis="x",
        data_axis="x",
    )

    def loss_fn(params, embedded, inputs):
        hidden = sum(embedded.values())
        for weights in params:
            hidden = jax.nn.relu(hidden @ weights)
        return jnp.mean(jnp.square(hidden))

    optimizer = optax.sgd(0.1)
    pipeline = xrex.make_pipeline(embeddings, loss_fn, optimizer, staleness=1)
    ((name, stack),) = embeddings.stacks.items()
    weights = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 3
    state = programs.shapes(
        mesh(),
        xrex.PipelineState(
            table=None,
            rule_state={name: jax.eval_shape(lambda: rules[0].init(stack.vocab))},
            dense_params=weights,
            optimizer_state=jax.eval_shape(optimizer.init, weights),
            step=jax.ShapeDtypeStruct((), jnp.int32),
        ),
    )
    table = jax.ShapeDtypeStruct((stack.vocab, 512), jnp.float32)
    return pipeline, state._replace(
        table={name: programs.shapes(mesh(), table, None, "x")},
        current_batch=xrex.Batch(embeddings.batch_shapes(weighted=True), ()),
    )


def test_a_step_with_bags_exchanges_once_each_way_and_works_in_place():
    pipeline, state = model_with_bags()
    report, _ = compiled(lambda: pipeline.lower_step(state, state.current_batch))
    kinds = collections.Counter(c.kind for c in report.collectives)
    # XLA may gather ids and segments together.
    assert kinds["all-gather"] <= 2
    assert kinds["all-to-all"] == 2
    # The first outputs are the table, and what the rule holds for each of its rows.
    for output in range(2):
        assert f"{{{output}}}: ({output}, " in report.aliases
    assert {kernel.name for kernel in report.kernels} == {
        "gather_rows",
        "segment_sum",
        "update_rows",
    }


@pytest.mark.parametrize(
    ("program", "gpus"),
    [
        (donating_programs.a_lookup_in_flight, 1),
        (donating_programs.a_lookup_in_flight, 4),
        (donating_programs.after_a_fori_loop, 4),
    ],
)
def test_a_gated_update_works_in_place(program, gpus):
    import xrex

    vocab, width, tokens = 100_000, donating_programs.WIDTH, donating_programs.TOKENS
    handle = xrex.make_context_handle(
        mesh(gpus),
        "x",
        data_axis="x",
        tokens_per_batch=tokens,
        emb_width=width,
        num_unique=tokens,
        num_devices_per_node=8,
    )
    arguments = donating_programs.shapes_of(handle, "bfloat16", vocab)
    jitted = jax.jit(
        lambda *arguments: program(handle, donating_programs.Arguments(*arguments)),
        donate_argnums=(2, 3),
    )
    report, _ = compiled(lambda: jitted.lower(*arguments))
    shard = vocab * width * 2 // gpus
    assert report.memory.aliased >= shard
    assert report.memory.temporary < shard / 10


def test_more_gpus_than_one_host():
    devices = topology.gpu_devices(topology.TARGETS["h200"], 8, hosts=8)
    assert len(devices) == 64
    assert {device.compute_capability for device in devices} == {"9.0"}


def test_the_description_names_what_matters():
    shape = programs.KernelShape(8, "float32", vocab=100, tokens=8, segments=8)
    program = programs.kernel_programs(mesh(1), shape)[-1]
    text = program_text.describe(*compiled(program.lower))
    assert "in place: {}: (0, {}, may-alias)" in text
    assert "kernels: update_rows" in text
    assert "0 bytes spilled" in text


def test_the_command_compiles_and_keeps_what_it_is_asked_to(tmp_path, capsys):
    """`python -m tools.compile_for_gpu`, within this process."""
    # Of sizes that no other test compiles: kernels are dumped once per process.
    folders = [f"--ptx={tmp_path}/ptx", f"--hlo={tmp_path}/hlo"]
    sizes = ["--gpus=2", "--widths=24", "--vocab=1234"]
    status = compile_for_gpu.COMMAND.status(
        compile_for_gpu.main, ["kernels", "--dtype=float32", *sizes, *folders]
    )
    told, err = capsys.readouterr()
    assert (status, err) == (0, "")
    assert told.startswith("for 2 x NVIDIA H100 80GB HBM3\n")
    names = ("gather_rows", "segment_sum", "update_rows")
    for name in names:
        assert f"{name} 24 x float32: compiled in" in told
        assert f"kernels: {name}" in told
    assert {file.name for file in (tmp_path / "hlo").iterdir()} == {
        f"{name}_24_x_float32.hlo" for name in names
    }
    assert list((tmp_path / "ptx").glob("*.ptx"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["kernels", "--widths=3"], "a row of 3 x bfloat16 is 6 bytes"),
        (["kernels", "--widths=8,abc"], "--widths=8,abc: 'abc' cannot be used"),
        (["step", "--emb_width=500"], "Change it: --emb_width=504 or --emb_width=496"),
        (["os:getcwd"], "os:getcwd: calling it raised TypeError"),
        (["os:absent"], "module 'os' has no function 'absent'"),
    ],
)
def test_what_cannot_be_compiled_is_told_in_one_message(arguments, told, capsys):
    assert compile_for_gpu.COMMAND.status(compile_for_gpu.main, arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("compile_for_gpu: ")
    assert told in err
    assert "Traceback" not in err
