"""Small results of the benchmarks, for the tests of what shows them."""

import dataclasses

from benchmarks import harness
from benchmarks.cases import (
    SWEEP,
    AtomicCase,
    CastCase,
    ElementwiseCase,
    KernelCase,
    LadderCase,
    PermuteCase,
    ScatterCase,
)


def rated(us):
    return {"us": us, "iqr_us": 0.1, "tb_per_s": 1 / us, "samples_us": [us]}


def upsampling():
    """Two rows, of which ours loses one, and one that failed."""
    row = {"group": "forward", "variant": "2x", "dtype": "float32", "bytes": 1000000}
    row |= {"op": "upsample_nearest2d"}
    row |= {"implementation": "native", "jnp": ["resize", "repeat"]}

    def measured(name, ours, resize, repeat):
        rivals = {"resize": rated(resize), "repeat": rated(repeat), "torch": {"error": "no"}}
        timed = {"ours": rated(ours), "rivals": rivals, "ceilings": {"copy": rated(1.0)}}
        return harness.summarise({**row, "case": name, **timed})

    about = {"device": "NVIDIA H200", "platform": "gpu", "driver": "580", "commit": "c0ffee"}
    about |= {"versions": {"jax": "1.2"}, "dirty": False, "date": "2026-01-02T03:04:05"}
    rows = [measured("fwd-a", 2.0, 8.0, 4.0), measured("fwd-b", 4.0, 2.0, 6.0)]
    rows.append({**row, "case": "fwd-c", "error": "wrong", "rivals": {}})
    shell = {"suite": "upsample", "clock": "cupti", "ceiling": "a copy", "notes": []}
    return {**shell, "environment": about, "rows": rows}


def row(case, ours, rivals, jnp=("jnp",), **more):
    """A row of times in microseconds; ``more`` is what else is known of rivals."""
    row = {"case": case.name, "op": case.op, "group": case.group, "variant": case.variant}
    row |= {"dtype": case.dtype, "bytes": case.bytes, "implementation": "native"}
    timed = {name: {**rated(us), **more.get(name, {})} for name, us in rivals.items()}
    row |= {"ours": rated(ours), "rivals": timed, "jnp": list(jnp)}
    return harness.summarise({**row, "ceilings": {"copy": rated(1.0)}})


def suites():
    """Small results of the other suites, by name."""

    def case(op, dtype, group="forward", size="512 MiB"):
        return ElementwiseCase(op, dtype, 1 << 20, size, group)

    ops = [
        row(case("silu", "float32"), 2.0, {"jnp": 3.0, "torch": 4.0}),
        row(case("silu", "float32", "derivative"), 2.0, {"jnp": 1.0, "torch": 4.0}),
        row(case("multiply", "float16"), 2.0, {"jnp": 2.0, "torch": 2.0, "naive": 3.0}),
        row(case("silu", "float32", size="64 MiB"), 2.0, {"jnp": 6.0, "torch": 4.0}),
        row(case("silu", "float32", SWEEP, "1 KiB"), 2.0, {"jnp": 2.5, "1 element": 1.5}),
    ]
    wide = {"requests": 131072, "sectors": 2097152, "load_bits": 128, "store_bits": 128}
    counts = {"scalar": {**wide, "requests": 524288}, "vec2": {**wide, "requests": 262144}}
    errors = {"vec4 half2": {"max_error": 9e-4}, "ours, f32 math": {"max_error": 2e-4}}
    f32 = {"jnp": 9.0, "scalar": 8.0, "vec2": 8.0, "vec4": 8.0, "ours, f32 math": 7.0}
    f16 = {"half2": 5.0, "vec4 half2": 4.0, "cute": 4.02, "ours, f32 math": 4.0}
    ladder = [
        row(LadderCase("float32", 16 << 20), 7.0, f32, **counts, vec4=wide),
        row(LadderCase("float16", 16 << 20), 4.0, {"jnp": 6.0, **f16}, **errors),
    ]
    ladder[1]["rivals"]["cute"]["ncu"] = "no permission"
    casts = [row(CastCase("float32", "int8", 99, "64 MiB"), 2.0, {"astype": 1.0}, ["astype"])]
    rows = {"elementwise": ops, "gelu_ladder": ladder, "cast": casts}
    sizes = ("segment_sum", 16 << 20, 1, 1024, "hot")
    rms = [{"rms_error": error} for error in (2e-4, 5e-2)]
    times = {"deterministic": 6.0, "jnp": 4.0, "torch": 8.0}
    rows["scatter"] = [row(ScatterCase(*sizes, "float16"), 2.0, times)]
    rows["scatter"][0]["rivals"]["jnp"] |= rms[1]
    rows["scatter"][0]["ours"] |= rms[0]
    rows["scatter"][0]["rivals"]["torch"] |= {"once": True, "us": 2.5e6}
    forms = {"half": 90.0, "half2": 30.0, "FastAtomicAdd": 20.0, "one a block": 2.0}
    errors = {name: {"relative_error": 0.9} for name in forms}
    rows["atomic_add"] = [row(AtomicCase(32 << 20), 4.0, forms, [], **errors)]
    rows["atomic_add"] += [row(AtomicCase(16 << 10), 4.0, forms, [], **errors)]
    for found in rows["atomic_add"]:
        found["ours"]["relative_error"] = 1e-7
    rows["atomic_add"][1]["rivals"]["half"] = {"skipped": "not run: 9 s"}
    images = PermuteCase((32, 225, 225, 3), (0, 3, 1, 2), "images", "int8")
    kept, swapped = (
        PermuteCase((64, 256, 256), axes, str(axes), "float32", "article")
        for axes in ((1, 0, 2), (0, 2, 1))
    )
    times = {"jnp": 3.0, "naive": 9.0, "naive, 32-bit": 6.0}
    rows["permute"] = [
        row(images, 2.0, {"jnp": 1.0, "torch": 4.0}),
        row(dataclasses.replace(images, dtype="complex64"), 2.0, {"jnp": 3.0, "torch": 4.0}),
        row(kept, 2.0, {**times, "torch": 2.6}),
        row(swapped, 2.0, {**times, "torch": 4.0}),
    ]
    for found in rows["permute"]:
        found["ours"] |= {"strategy": "runs", "unit_bytes": 1}
    expression = KernelCase("silu", "float32", 1 << 20, "256 MiB")
    rows["kernels"] = [row(expression, 2.0, {"built-in": 2.5, "jnp": 3.0})]
    return {suite: {**upsampling(), "suite": suite, "rows": rows[suite]} for suite in rows}
