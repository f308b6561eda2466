"""tcgen05.fence and wgmma.fence: where the PTX ISA asks for one, leaving it out is reported; where it does not, nothing is."""

from __future__ import annotations

import numpy as np
import ptxsim
import pytest
from emulator.core.ptx_kernel import run

SCHEDULES = [("early", 0), ("late", 0), ("random", 1), ("random", 2)]
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"

# ---- tcgen05 (PTX ISA 9.7.16.6) --------------------------------------------------------------------------------------

# Warp 0 allocates; warps 0 and 4 reach the same lanes. Two mbarriers, at 512 and 520.
BEGIN = """
  .reg .pred p0, p4, one; .reg .b32 tmem;
  setp.lt.u32 p0, tx, 32; setp.ge.u32 p4, tx, 128; setp.eq.u32 one, tx, 0;
  @one mbarrier.init.shared.b64 [smem+512], 32; @one mbarrier.init.shared.b64 [smem+520], 1;
  @one fence.mbarrier_init.release.cluster;
  @!p0 bra ALLOCATED; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 64;
  ALLOCATED: bar.sync 0; ld.shared.u32 tmem, [smem];
"""
END = "END: bar.sync 0; @!p0 bra FREED; tcgen05.dealloc.cta_group::1.sync.aligned.b32 tmem, 64; FREED:"
WAIT = "{name}: mbarrier.try_wait.parity{sem}.shared::cta.b64 q, [smem+{at}], 0; @!q bra {name};"
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [tmem], {tx}; tcgen05.wait::st.sync.aligned;"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {t1}, [tmem]; tcgen05.wait::ld.sync.aligned;"
MMA = """
  cvt.u64.u32 w1, smem; add.u64 w1, w1, 1024; shr.u64 w1, w1, 4; mov.b64 w, 0x401000080000; or.b64 w, w, w1;
  mov.b32 t3, 0x08040490; setp.ne.b32 q, 0, 0;
  tcgen05.mma.cta_group::1.kind::f16 [tmem], w, w, t3, q;
"""
FILL = """
  mov.b32 t2, 0; shl.b32 t4, tx, 4; add.u32 t4, t4, smem;
  st.shared.v4.b32 [t4+1024], {t2, t2, t2, t2}; st.shared.v4.b32 [t4+3584], {t2, t2, t2, t2};
"""


def tcgen05(body: str, schedule: str = "early", seed: int = 0, **options: object) -> None:
    run(
        BEGIN + body + END,
        np.zeros(64, np.uint32),
        block=160,
        smem=8192,
        schedule=schedule,
        seed=seed,
        **options,
    )


def handover(sem: str, before: str, after: str, *, first: str = STORE, then: str = LOAD) -> str:
    """Warp 0 does `first`, then arrives; warp 4 waits, then does `then`."""
    arrive, wait = {"relaxed": (".relaxed.cluster", ".relaxed.cluster"), "release": ("", "")}[sem]
    return f"""
      @p4 bra SECOND; @!p0 bra END;
      {first} {before} mbarrier.arrive{arrive}.shared::cta.b64 _, [smem+512]; bra END;
      SECOND: {WAIT.format(name="W0", sem=wait, at=512)} {after} {then}
    """


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_relaxed_synchronisation_needs_both_fences(schedule: str, seed: int) -> None:
    """9.7.16.6.4.4, different threads: before_thread_sync, relaxed arrive; relaxed wait, after_thread_sync."""
    tcgen05(handover("relaxed", BEFORE, AFTER), schedule, seed)
    for before, after in ((BEFORE, ""), ("", AFTER), ("", "")):
        with pytest.raises(ptxsim.Race, match="race on TMEM"):
            tcgen05(handover("relaxed", before, after), schedule, seed)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_release_and_acquire_order_tcgen05_too(schedule: str, seed: int) -> None:
    """9.7.16.6.3: the standard mechanisms of the memory model also apply, unless `tmem_fences` asks for the fences."""
    tcgen05(handover("release", "", ""), schedule, seed)
    tcgen05(handover("release", BEFORE, AFTER), schedule, seed, tmem_fences=True)
    for before, after in ((BEFORE, ""), ("", AFTER), ("", "")):
        with pytest.raises(ptxsim.Race, match=r"missing tcgen05\.fence on TMEM"):
            tcgen05(handover("release", before, after), schedule, seed, tmem_fences=True)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_the_fence_does_not_replace_the_wait(schedule: str, seed: int) -> None:
    """9.7.16.6.4.4: the producer first waits for its ld or st; the fences alone complete nothing."""
    unwaited = STORE.replace("tcgen05.wait::st.sync.aligned;", "")
    with pytest.raises(ptxsim.Race, match="race on TMEM"):
        tcgen05(handover("relaxed", BEFORE, AFTER, first=unwaited), schedule, seed)
    load = STORE + " bar.warp.sync -1; " + LOAD.replace("tcgen05.wait::ld.sync.aligned;", "")
    again = STORE.replace("{tx}", "{smem}")
    tcgen05(handover("relaxed", BEFORE, AFTER, first=STORE + LOAD, then=again), schedule, seed)
    with pytest.raises(ptxsim.Race, match="race on TMEM"):
        tcgen05(handover("relaxed", BEFORE, AFTER, first=load, then=again), schedule, seed)


@pytest.mark.parametrize(
    "barrier", ["bar.sync 1, 64;", "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"]
)
def test_barriers_carry_the_fences(barrier: str) -> None:
    body = "@p4 bra SECOND; {skip} {first} {before} {barrier} bra END; SECOND: {barrier} {after} {then}"
    skip = "@!p0 bra {};".format("END" if "bar.sync" in barrier else "OTHER")
    other = "" if "bar.sync" in barrier else f"bra END; OTHER: {barrier}"
    parts = {"skip": skip, "first": STORE, "then": LOAD + other, "barrier": barrier}
    tcgen05(body.format(before="", after="", **parts))
    tcgen05(body.format(before=BEFORE, after=AFTER, **parts), tmem_fences=True)
    for before, after in ((BEFORE, ""), ("", AFTER)):
        with pytest.raises(ptxsim.Race, match=r"missing tcgen05\.fence"):
            tcgen05(body.format(before=before, after=after, **parts), tmem_fences=True)


COMMIT = "@one tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+520];"


def multiply(wait: str, after: str, second: str = "p4") -> str:
    """Thread 0 multiplies and commits; warp 4 (or warp 0 itself) waits for the commit and loads."""
    return f"""
      {FILL} fence.proxy.async.shared::cta; bar.sync 0;
      @!one bra ISSUED; {MMA} {COMMIT} ISSUED: @!{second} bra END;
      {WAIT.format(name="W1", sem=wait, at=520)} {after} {LOAD}
    """


@pytest.mark.parametrize("second", ["p4", "p0"])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_commit_implies_the_first_fence(second: str, schedule: str, seed: int) -> None:
    """9.7.16.6.4.2 and .4: mma, commit; relaxed wait, after_thread_sync, ld. In the same thread as well as in another."""
    tcgen05(multiply(".relaxed.cluster", AFTER, second), schedule, seed)
    tcgen05(multiply("", "", second), schedule, seed)
    tcgen05(multiply("", AFTER, second), schedule, seed, tmem_fences=True)
    with pytest.raises(ptxsim.Race, match="race on TMEM"):
        tcgen05(multiply(".relaxed.cluster", "", second), schedule, seed)
    with pytest.raises(ptxsim.Race, match=r"missing tcgen05\.fence"):
        tcgen05(multiply("", "", second), schedule, seed, tmem_fences=True)


def test_same_thread_needs_a_wait_but_no_fence() -> None:
    """9.7.16.6.4.2: st, wait::st, ld. 9.7.16.6.4.1: mma, mma."""
    tcgen05(f"@!p0 bra END; {STORE} {LOAD}", tmem_fences=True)
    twice = multiply("", AFTER).replace(MMA, MMA + MMA)
    tcgen05(twice, tmem_fences=True)


# ---- wgmma (PTX ISA 9.7.15.7.1) --------------------------------------------------------------------------------------

ACCUMULATORS = "{t4, t5, t6, t7}"
FENCE = "wgmma.fence.sync.aligned;"
COMMIT_GROUP = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"


def product(accumulators: str = ACCUMULATORS, a: str = "w", n: int = 8, keep: int = 1) -> str:
    transposes = ", 0" if a.startswith("{") else ", 0, 0"
    return (
        f"{{ .reg .pred k; setp.ne.b32 k, {keep}, 0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {accumulators}, {a}, w, "
        f"k, 1, 1{transposes}; }}"
    )


def wgmma(body: str) -> None:
    begin = f"""
      mov.b32 t0, 0; shl.b32 t1, tx, 4; add.u32 t1, t1, smem;
      st.shared.v4.b32 [t1], {{t0, t0, t0, t0}}; st.shared.v4.b32 [t1+2048], {{t0, t0, t0, t0}};
      fence.proxy.async.shared::cta; bar.sync 0; cvt.u64.u32 w, smem; shr.u64 w, w, 4; mov.b64 w1, 0x1000080000; or.b64 w, w, w1;
      {"".join(f"mov.b32 t{i}, 0; " for i in range(4, 20))}
    """
    run(begin + body, np.zeros(64, np.uint32), block=128, smem=8192, target="sm_90a")


READ = "add.u32 t30, t4, t5; mov.b32 t31, t30;"
TWO_FENCED = FENCE + product() + COMMIT_GROUP + READ + "{}" + product() + COMMIT_GROUP
CASES = {
    "before the first": ("{}" + product() + COMMIT_GROUP, "no wgmma.fence before the first"),
    "accumulator read in between": (TWO_FENCED, "no wgmma.fence between an access to t4"),
    "accumulator written in between": (TWO_FENCED.replace(READ, "mov.b32 t7, 0;"), "no wgmma.fence between an access to t7"),
    "also if it is overwritten": (TWO_FENCED.replace("setp.ne.b32 k, 1", "setp.ne.b32 k, 0"), "no wgmma.fence between"),
    "A in registers": (
        FENCE + product(a="{t8, t9, t10, t11}") + COMMIT_GROUP + "mov.b32 t9, 0; {}" + product(a="{t8, t9, t10, t11}") + COMMIT_GROUP,
        "no wgmma.fence between an access to t9",
    ),
    "another shape": (
        FENCE + product() + COMMIT_GROUP + "{}" + product("{t4, t5, t6, t7, t12, t13, t14, t15}", n=16) + COMMIT_GROUP,
        "no wgmma.fence between an access to t4",
    ),
    "in a loop": (
        FENCE + "mov.b32 t20, 0; LOOP: {}" + product() + COMMIT_GROUP + "add.u32 t4, t4, 1; add.u32 t20, t20, 1; "
        "setp.lt.u32 q, t20, 2; @q bra LOOP;",
        "no wgmma.fence between an access to t4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_wgmma_fence(name: str) -> None:
    body, message = CASES[name]
    wgmma(body.replace("{}", FENCE))
    with pytest.raises(ptxsim.Fault, match=message):
        wgmma(body.replace("{}", ""))


def test_accumulations_of_one_shape_need_one_fence() -> None:
    """9.7.15.7.1: "… across multiple wgmma.mma_async instructions of the same shape" are ordered by default."""
    wgmma(FENCE + product() + product() + COMMIT_GROUP + product() + COMMIT_GROUP)
    loop = (
        "mov.b32 t20, 0; LOOP: "
        + product()
        + COMMIT_GROUP
        + "add.u32 t20, t20, 1; setp.lt.u32 q, t20, 3; @q bra LOOP;"
    )
    wgmma(FENCE + loop)


def test_only_what_happens_is_reported() -> None:
    """A path without the fence that is not taken does not count."""
    body = "setp.lt.u32 q, tx, LIMIT; @!q bra SKIP; " + FENCE + " SKIP: " + product() + COMMIT_GROUP
    wgmma(body.replace("LIMIT", "1024"))
    with pytest.raises(ptxsim.Fault, match="before the first"):
        wgmma(body.replace("LIMIT", "0"))


def test_wgmma_needs_a_proxy_fence_for_its_operands() -> None:
    with pytest.raises(ptxsim.Race, match="missing proxy fence"):
        wgmma(f"st.shared.b32 [t1], t0; bar.sync 0; {FENCE} {product()} {COMMIT_GROUP}")
