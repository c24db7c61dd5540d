"""The rows of run.py as tables in Markdown: table.py FILE [SECTION ...]

Of several rows of a variant the last counts. The share of the matmul rate is by the rate in the
same file.
"""

import json
import sys
from pathlib import Path
from typing import Any

TRAINING = {
    "wall_ms": "ms per step",
    "device_ms": "ms on the device",
    "kernels": "kernels",
    "images_per_s": "images/s",
    "device_matmul_share": "share of the matmul rate",
    "peak_gib": "GiB",
    "first_step_s": "s of the first step",
}
CPU_KINDS = ("convolution", "matmul and attention", "norms", "SiLU")
CPU_KINDS += ("optimizer and average", "rest")
"""Parts of a step on a CPU."""
CPU = {"cpu_ms": "ms of CPU time", "ratio": "times ours", "low": "lower quartile"}
CPU |= {"high": "upper quartile"}
CPU |= {kind: kind.replace("average", "EMA") for kind in CPU_KINDS}
COLUMNS = {
    "cpu-digits": CPU,
    "cpu-cifar10": CPU,
    "ceilings": {"device_ms": "ms", "tflops": "TFLOP/s", "gb_per_s": "GB/s"},
    "cifar10": TRAINING,
    "dit": TRAINING,
    "imagenet128": TRAINING,
    "sampling": {
        "wall_ms": "ms for all images",
        "device_ms": "ms on the device",
        "kernels": "kernels",
        "images_per_s": "images/s",
    },
    "fit": {
        "trainer_ms": "ms per step of `fit`",
        "bare_ms": "ms of the bare loop",
        "overhead": "overhead",
        "images_per_s": "images/s",
        "waits_per_step": "waits per step",
    },
    "sharded": {
        "wall_ms": "ms per step",
        "images_per_s": "images/s",
        "peak_gib": "GiB",
        "planned_gib": "GiB by `plan`",
    },
    "norms": {"forward_ms": "ms forward", "both_ms": "ms forward and backward"},
    "ema": {"ms": "ms", "host_ms": "ms until the call returns"},
    "fid": {
        "total_seconds": "s",
        "generate_seconds": "s of sampling",
        "features_seconds": "s of Inception",
        "first_seconds": "s of the first evaluation, with the real images",
        "peak_gib": "GiB",
    },
}
TITLES = {
    "cpu-digits": "digits U-Net, training step of 64 on a CPU",
    "cpu-cifar10": "CIFAR-10 U-Net, training step of 4 on a CPU",
    "ceilings": "operation on the device",
    "cifar10": "CIFAR-10 U-Net, training step of 128",
    "dit": "DiT-XL/2, training step of 64",
    "imagenet128": "ImageNet-128 U-Net, training step of 32",
    "sampling": "512 images of 32x32, DDIM in 50 steps",
    "fit": "`fit` compared with a bare loop",
    "ema": "one EMA update of 52.5M weights",
    "fid": "FID",
    "sharded": "DiT of a billion weights, training step of 32",
    "norms": "GroupNorm and SiLU of 128x256x32x32 in bfloat16",
}
ORDER = (
    *("matmul, convolution, attention", "fused by inductor", "norms", "elementwise", "copies"),
    *("reductions", "random numbers", "optimizer and EMA", "other"),
)
"""Kinds of kernels, as in `measure.KINDS`."""
PERCENT = ("device_matmul_share", "overhead")


def last_rows(path: Path, section: str) -> dict[str, dict[str, Any]]:
    """The last row of each variant of a section, by its name."""
    rows = map(json.loads, path.read_text().splitlines())
    return {row["variant"]: row for row in rows if row["section"] == section}


def set_matmul_shares(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Set each row's share of the matmul rate to that of the last rate in the file."""
    rate = last_rows(path, "ceilings").get("matmul, bf16", {}).get("tflops")
    for row in rows.values():
        row.pop("device_matmul_share", None)  # by the rate of the row's own run
        flops, ms = row.get("flops"), row.get("device_ms")
        if flops and ms and rate:
            row["device_matmul_share"] = flops / 1e9 / ms / rate


def cell(column: str, value: Any) -> str:
    if column in PERCENT:
        return f"{100 * value:+.1f}%" if column == "overhead" else f"{100 * value:.0f}%"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def table(path: Path, section: str) -> list[str]:
    """The rows of a section, in the columns that one of them has; nothing if there are none."""
    rows = last_rows(path, section)
    set_matmul_shares(path, rows)
    columns = {
        key: head
        for key, head in COLUMNS[section].items()
        if any(row.get(key) is not None for row in rows.values())
    }
    lines = [f"| {TITLES[section]} | {' | '.join(columns.values())} |"]
    lines += ["|---" * (len(columns) + 1) + "|"]
    for variant, row in rows.items():
        missing = "-" if row.keys() & columns.keys() else "not measured"
        cells = [
            cell(column, row[column]) if row.get(column) is not None else missing
            for column in columns
        ]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return lines if columns else []


def kinds_table(path: Path, section: str) -> list[str]:
    """Milliseconds a step on the device by kind of kernel; nothing if there are none."""
    rows = {
        name: row["kinds_ms"] for name, row in last_rows(path, section).items() if "kinds_ms" in row
    }
    kinds = sorted({kind for row in rows.values() for kind in row}, key=ORDER.index)
    lines = [f"| {TITLES[section]}, ms on the device by kind of kernel | {' | '.join(kinds)} |"]
    lines += ["|---" * (len(kinds) + 1) + "|"]
    for variant, row in rows.items():
        lines.append(f"| {variant} | {' | '.join(f'{row.get(kind, 0):.1f}' for kind in kinds)} |")
    return lines if rows else []


if __name__ == "__main__":
    file, *sections = sys.argv[1:]
    for name in sections or COLUMNS:
        for make in (table, kinds_table):
            if lines := make(Path(file), name):
                print("\n".join([*lines, ""]))
