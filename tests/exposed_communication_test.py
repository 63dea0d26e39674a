"""Exposed communication, by hand for small HLO texts, then of steps compiled for eight H100s."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tools.gpu import compiled_program, program_text, programs, topology
from tools.gpu.collectives import find_collectives
from tools.gpu.exposed_communication import Beside, exposed_communication
from tools.gpu.hlo_text import parse
from tools.gpu.topology import GpuTarget
from xrex.layout.plan_wire import plan_wire

# Round figures: a float takes 0.4 s on the wire and 0.04 s to read or to write.
TOY = GpuTarget("toy", "toy", 0, memory_bandwidth=100.0, bf16_flops=1000.0, link_bandwidth=10.0)

# A gather from each of four: 3 x 40 bytes sent, 12 s. An exchange: 3/4 of 160 bytes, 12 s too.
PARAMETERS = """
  %p = f32[10]{0} parameter(0)
  %q = f32[4,10]{1,0} parameter(1)
  %small = f32[100]{0} parameter(2)
  %large = f32[200]{0} parameter(3)
"""
GATHER_START = """
  %gather = (f32[10]{0}, f32[40]{0}) all-gather-start(%p), replica_groups={{0,1,2,3}}, \
dimensions={0}, metadata={op_name="jit(f)/all_gather"}
"""
GATHER_DONE = "  %gathered = f32[40]{0} all-gather-done(%gather)\n"
EXCHANGE_START = """
  %exchange = ((f32[4,10]{1,0}), f32[4,10]{1,0}) all-to-all-start(%q), \
replica_groups=[1,4]<=[4], dimensions={0}
"""
EXCHANGE_DONE = "  %exchanged = f32[4,10]{1,0} all-to-all-done(%exchange)\n"
# 400 bytes read and 400 written: 8 s; twice as many: 16 s.
COPY_8 = "  %copy.8 = f32[100]{0} copy(%small)\n"
COPY_8_MORE = COPY_8.replace("copy.8", "copy.9")
COPY_16 = "  %copy.16 = f32[200]{0} copy(%large)\n"


def module(*lines, others=""):
    header = "HloModule toy, is_scheduled=true, num_partitions=4"
    entry = "ENTRY %main (p: f32[10]) -> f32[10] {"
    return parse("\n".join((header, others, entry, *lines, "}")))


def exposures(*lines, others=""):
    found = exposed_communication(module(PARAMETERS, *lines, others=others), TOY)
    return {exposure.collective.name: exposure for exposure in found}


def seconds(line, others=""):
    """What the model takes an instruction for: how much of an endless exchange it hides."""
    endless = EXCHANGE_START.replace("4,10", "4,1000000").replace("%q", "%endless")
    argument = "  %endless = f32[4,1000000]{1,0} parameter(9)\n"
    (exposure,) = exposures(argument, endless, line, EXCHANGE_DONE, others=others).values()
    return pytest.approx(exposure.hidden_seconds)


def test_longer_compute_hides_a_collective():
    (exposure,) = exposures(GATHER_START, COPY_16, GATHER_DONE).values()
    assert exposure.collective.kind == "all-gather"
    assert exposure.collective.wire_bytes == 120
    assert exposure.collective.operation == "jit(f)/all_gather"
    assert exposure.wire_seconds == 12
    assert exposure.hidden_seconds == 12
    assert exposure.exposed_seconds == 0
    assert exposure.beside == (Beside("copy.16", 16),)


def test_shorter_compute_hides_a_part():
    (exposure,) = exposures(COPY_16, GATHER_START, COPY_8, GATHER_DONE, COPY_16).values()
    assert exposure.exposed_seconds == 4
    assert exposure.beside == (Beside("copy.8", 8),)


@pytest.mark.parametrize(
    "lines",
    [
        [
            GATHER_START.replace("-start", "").replace("(f32[10]{0}, f32[40]{0})", "f32[40]{0}"),
            COPY_16,
        ],
        # XLA runs such a pair in line with the compute, whatever stands between the two.
        [
            GATHER_START.rstrip() + ', backend_config={"is_sync":true}\n',
            COPY_16,
            GATHER_DONE,
        ],
    ],
    ids=["alone", "start and done"],
)
def test_a_synchronous_collective_is_exposed_whole(lines):
    (exposure,) = exposures(*lines).values()
    assert not exposure.collective.is_asynchronous
    assert exposure.exposed_seconds == 12
    assert exposure.beside == ()


def test_compute_is_credited_once():
    found = exposures(GATHER_START, EXCHANGE_START, COPY_16, GATHER_DONE, EXCHANGE_DONE)
    assert found["gather"].exposed_seconds == 0
    # The gather had 12 of the 16 s.
    assert found["exchange"].exposed_seconds == 8
    assert found["exchange"].beside == found["gather"].beside == (Beside("copy.16", 16),)


def test_a_collective_waited_for_has_the_links():
    found = exposures(
        GATHER_START, EXCHANGE_START, COPY_8, EXCHANGE_DONE, COPY_8_MORE, GATHER_DONE, COPY_16
    )
    assert found["exchange"].exposed_seconds == 12
    assert found["gather"].exposed_seconds == 0


@pytest.mark.parametrize(
    ("line", "wire_bytes"),
    [
        ("%x = f32[40]{0} all-gather(%p), replica_groups={{0,1,2,3}}", 120),
        ("%x = f32[10]{0} all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add", 60),
        ("%x = f32[25]{0} reduce-scatter(%small), replica_groups={{0,1,2,3}}", 300),
        ("%x = f32[4,10]{1,0} all-to-all(%q), replica_groups={{0,1,2,3}}", 120),
        ("%x = f32[10]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}", 40),
        # Several arrays in one; and a count that four does not divide.
        ("%x = (f32[10]{0}, f32[100]{0}) all-reduce(%p, %small), replica_groups={}", 660),
        ("%x = pred[] all-reduce(%flag), replica_groups={}", 2),
    ],
)
def test_wire_bytes(line, wire_bytes):
    text = module(PARAMETERS, "  %flag = pred[] parameter(4)\n", f"  {line}\n")
    (collective,) = find_collectives(text)
    assert collective.wire_bytes == wire_bytes


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1},{2,3}}", 2),
        ("{{0,1,2,3}}", 4),
        ("{}", 4),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['x'=8] {'x'}", 8),
        ("mesh['a'=2,'b'=4,'c'=3] {'a','c'}", 6),
        ("mesh['a'=2,'b'=8] {'b':(2)4}", 4),
    ],
)
def test_groups_in_all_their_forms(groups, size):
    line = f"  %x = f32[10]{{0}} all-gather(%p), channel_id=1, replica_groups={groups}, use=true\n"
    (collective,) = find_collectives(module(PARAMETERS, line))
    assert collective.wire_bytes == 40 * (size - 1)


def test_unknown_groups_are_an_error():
    text = module(PARAMETERS, "  %x = f32[10]{0} all-gather(%p), replica_groups=all\n")
    with pytest.raises(ValueError, match="the groups of x are in no known form"):
        list(find_collectives(text))


def test_a_text_without_entry_is_an_error():
    with pytest.raises(ValueError, match="no HLO module"):
        parse("module @jit_f {}")


def test_a_wrapped_collective_counts_once():
    inner = """
%wrapped (q.1: f32[4,10]) -> f32[4,10] {
  %q.1 = f32[4,10]{1,0} parameter(0)
  ROOT %inner = f32[4,10]{1,0} all-to-all(%q.1), replica_groups={{0,1,2,3}}, dimensions={0}
}
"""
    start = """
  %exchange = ((f32[4,10]{1,0}), f32[4,10]{1,0}) async-start(%q), calls=%wrapped
"""
    done = "  %exchanged = f32[4,10]{1,0} async-done(%exchange)\n"
    (exposure,) = exposures(start, COPY_8, done, others=inner).values()
    assert exposure.collective.kind == "all-to-all"
    assert exposure.exposed_seconds == 4


FUSED = """
%body (a: f32[200], b: f32[200]) -> f32[200] {
  %a = f32[200]{0} parameter(0)
  %b = f32[200]{0} parameter(1)
  %c = f32[200]{0} add(%a, %b)
  ROOT %d = f32[200]{0} multiply(%c, %b)
}
"""


def test_a_fusion_is_one_instruction():
    line = "  %f = f32[200]{0} fusion(%large, %large), kind=kLoop, calls=%body\n"
    (exposure,) = exposures(GATHER_START, line, GATHER_DONE, others=FUSED).values()
    # Its operand, given twice, is read once.
    assert exposure.beside == (Beside("f", 16),)


DOT = """
%product (l: bf16[30,100], r: bf16[100,10]) -> bf16[30,10] {
  %l = bf16[30,100]{1,0} parameter(0)
  %r = bf16[100,10]{1,0} parameter(1)
  ROOT %dot = bf16[30,10]{1,0} dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
MATRICES = """%l.1 = bf16[30,100]{1,0} parameter(5)
  %r.1 = bf16[100,10]{1,0} parameter(6)
  """


def test_dots_take_their_operations():
    # 2 x 30 x 10 x 100 operations, 60 s; 8,600 bytes would take 86 s, and with a wider dot less.
    fused = "%f = bf16[30,10]{1,0} fusion(%l.1, %r.1), kind=kCustom, calls=%product"
    assert seconds(MATRICES + fused, others=DOT) == 86
    wider = (DOT.replace("10]", "40]"), (MATRICES + fused).replace("10]", "40]"))
    # 240 s, against 6,000 + 8,000 + 2,400 bytes.
    assert seconds(wider[1], others=wider[0]) == 240


def test_a_librarys_dot_does_not_fill_its_scratch_memory():
    line = """%m = (bf16[30,10]{1,0}, s8[4194304]{0}) custom-call(%l.1, %r.1), \
custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}"""
    assert seconds(MATRICES + line) == 86
    assert seconds((MATRICES + line).replace("10]", "40]")) == 240


GATHERED = """
%rows (t: f32[1000000,5], i: s32[10]) -> f32[10,5] {
  %t = f32[1000000,5]{1,0} parameter(0)
  %i = s32[10]{0} parameter(1)
  ROOT %g = f32[10,5]{1,0} gather(%t, %i), offset_dims={1}, slice_sizes={1,5}
}
"""
SCATTERED = """
%into (t: f32[1000000,5], i: s32[10], u: f32[10,5]) -> f32[1000000,5] {
  %t = f32[1000000,5]{1,0} parameter(0)
  %i = s32[10]{0} parameter(1)
  %u = f32[10,5]{1,0} parameter(2)
  ROOT %s = f32[1000000,5]{1,0} scatter(%t, %i, %u), to_apply=%set
}
"""
TABLE = """%table = f32[1000000,5]{1,0} parameter(5)
  %ids = s32[10]{0} parameter(6)
  %new = f32[10,5]{1,0} parameter(7)
  %zero = s32[] constant(0)
  """


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # 200 bytes read, 40 of ids (or 4), 200 written.
        ("%x = f32[10,5]{1,0} fusion(%table, %ids), kind=kLoop, calls=%rows", 4.4),
        ("%x = f32[10,5]{1,0} dynamic-slice(%table, %zero, %zero)", 4.04),
        ('%x = f32[10,5]{1,0} custom-call(%table, %ids), custom_call_target="mosaic_gpu"', 4.4),
        # 200 bytes of updates, read and written.
        ("%x = f32[1000000,5]{1,0} fusion(%table, %ids, %new), calls=%into", 4),
        ("%x = f32[1000000,5]{1,0} dynamic-update-slice(%table, %new, %zero, %zero)", 4),
        # The kernel's updates and ids, read; what it does to the table is not known.
        (
            "%x = f32[1000000,5]{1,0} custom-call(%table, %ids, %new), "
            'custom_call_target="mosaic_gpu", output_to_operand_aliasing={{}: (0, {})}',
            2.4,
        ),
        (
            "%x = (f32[10]{0}, f32[1000000,5]{1,0}) custom-call(%ids, %table, %new), "
            'custom_call_target="mosaic_gpu", output_to_operand_aliasing={{1}: (1, {})}',
            2.8,
        ),
        ('%x = f32[1000000,5]{1,0} custom-call(), custom_call_target="AllocateBuffer"', 0),
        ("%x = f32[5000000]{0} bitcast(%table)", 0),
        ("%x = (f32[5000000]{0}, f32[5000000]{0}, u32[]) copy-start(%table)", 0),
    ],
)
def test_what_touches_a_few_rows_does_not_move_the_table(line, expected):
    assert seconds(TABLE + line, others=GATHERED + SCATTERED) == expected


LOOP = """
%step (s: f32[100]) -> f32[100] {
  %p = f32[10]{0} parameter(0)
  %small = f32[100]{0} parameter(1)
INSIDE
}
"""
WHILE = "%w = f32[100]{0} while(%small), condition=%c, body=%step"
TRIPS = ', backend_config={"known_trip_count":{"n":"3"}}'


@pytest.mark.parametrize(("known", "expected"), [("", 8), (TRIPS, 24)])
def test_a_loop_counts_as_often_as_it_is_known_to_run(known, expected):
    assert seconds(WHILE + known, others=LOOP.replace("INSIDE", COPY_8)) == expected


def test_a_collective_in_a_loop_shares_the_loops_compute():
    others = LOOP.replace("INSIDE", GATHER_START + COPY_8 + GATHER_DONE + COPY_8_MORE)
    found = exposures(EXCHANGE_START, WHILE + TRIPS, EXCHANGE_DONE, others=others)
    # Three times: of 12 s, 8 are hidden; the other copy's 8 s remain for what travels beside.
    assert found["gather"].wire_seconds == 36
    assert found["gather"].exposed_seconds == 12
    assert found["exchange"].beside == (Beside("w", 24),)
    assert found["exchange"].exposed_seconds == 0


def test_a_branch_counts_as_its_shortest_side():
    longer = LOOP.replace("%step", "%other").replace("INSIDE", COPY_8 + COPY_8_MORE)
    sides = longer + LOOP.replace("INSIDE", COPY_8)
    line = "%x = f32[100]{0} conditional(%p, %small, %small), branch_computations={%other, %step}"
    assert seconds(line, others=sides) == 8


def test_the_text_names_the_peaks_and_the_culprits():
    found = exposures(GATHER_START, EXCHANGE_START, COPY_16, GATHER_DONE, EXCHANGE_DONE)
    text = program_text.describe_exposed(
        tuple(found.values()), topology.TARGETS["h100"]
    ).splitlines()
    assert text[0].startswith("  exposed communication: 8000000.00 of 24000000.00 us on the wire")
    assert "links of 450 GB/s each way" in text[0]
    assert "memory of 3,352 GB/s, dots at 989 TFLOP/s" in text[0]
    assert text[1:] == [
        "    8000000.00 of 12000000.00 us: exchange, 120 bytes, beside copy.16 (16000000.00 us)"
    ]


OBSTACLE = topology.missing()


def compiles_for_gpus(test):
    for mark in (
        pytest.mark.compile_gpu,
        pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE)),
        # XLA says so where it would ask a GPU how much scratch memory a sort needs.
        pytest.mark.filterwarnings("ignore:Missing deviceless CUB"),
    ):
        test = mark(test)
    return test


@functools.cache
def compiled_step(staleness):
    """Layout, exposures and memory of what `python -m tools.compile_for_gpu step` compiles."""
    target = topology.TARGETS["h100"]
    mesh = Mesh(np.array(topology.gpu_devices(target, 8)), ("x",))
    shape = programs.StepShape(programs.whole_mesh_layout(mesh), staleness=staleness)
    report = compiled_program.read(programs.lower_step(shape).compile())
    return programs.step_handle(shape), exposed_communication(report.module, target), report.memory


@compiles_for_gpus
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_sends_what_is_planned(staleness):
    handle, found, _ = compiled_step(staleness)
    for kind in ("all-gather", "all-to-all"):
        planned = [p for p in plan_wire(handle, 2, 0.0) if p.operation == kind]
        sent = [e.collective for e in found if e.collective.kind == kind]
        assert sum(c.wire_bytes for c in sent) == sum(p.bytes_sent for p in planned)


def exchange_in(found, scope):
    (exchange,) = (
        exposure
        for exposure in found
        if exposure.collective.kind == "all-to-all" and scope in exposure.collective.operation
    )
    return exchange


@compiles_for_gpus
def test_deferred_gradients_travel_beside_the_forward_pass():
    _, found, _ = compiled_step(1)
    assert exchange_in(found, "xrex.update_start").exposed_seconds == 0


@compiles_for_gpus
def test_the_next_rows_travel_beside_the_backward_pass():
    _, found, _ = compiled_step(1)
    assert exchange_in(found, "xrex.exchange_rows").exposed_seconds == 0


@compiles_for_gpus
def test_overlap_leaves_a_tenth_of_the_exposed_communication():
    now, ahead = (sum(e.exposed_seconds for e in compiled_step(n)[1]) for n in (0, 1))
    assert ahead < now / 10
    assert ahead <= 0.78e-6


@compiles_for_gpus
def test_overlap_holds_no_more_than_it_did():
    # As much as in 0.1 with JAX 0.12, which packs buffers more tightly than 0.10 does.
    most = 51.6e6 if jax.__version_info__ >= (0, 11) else 53.1e6
    assert compiled_step(1)[2].temporary <= most
