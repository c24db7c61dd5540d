"""Ours beside the code of public references, on random configurations, as a table.

    python tests/benchmarks/references.py --references DIR [--only NAME ...] [--num 200] [--seed 0]

DIR holds clones of the repositories below; diffusers is the installed one. What the clones import:
pip install einops timm torchdiffeq torchsde && pip install --no-deps dctorch (which would bring an
old numpy). All of it computes in float64. Exit code 1 where a deviation is more than rounding.
"""

import argparse
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from random import Random

import torch

sys.path.append(str(Path(__file__).parents[1]))  # tests, for `support`
from reference_adapters.common import Comparison, in_float64

REFERENCES = {
    "improved-diffusion": "improved_diffusion",
    "guided-diffusion": "guided_diffusion",
    "k-diffusion": "k_diffusion",
    "U-ViT": "uvit",
    "DiT": "dit",
    "diffusers": "hf_diffusers",
}
ROUNDING = 1e-6


def load(folder: Path, name: str) -> dict[str, Comparison]:
    """The comparisons with a reference, whose code comes from its clone."""
    sys.path.append(str(folder / name))
    if name == "k-diffusion":  # whose __init__ imports what only training needs
        package = types.ModuleType("k_diffusion")
        package.__path__ = [str(folder / name / "k_diffusion")]
        sys.modules["k_diffusion"] = package
    return import_module(f"reference_adapters.{REFERENCES[name]}").COMPARISONS


def commit(folder: Path, name: str) -> str:
    if name == "diffusers":
        return version("diffusers")
    command = ["git", "-C", str(folder / name), "rev-parse", "--show-toplevel", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return answer[1][:8] if answer and Path(answer[0]) == (folder / name).resolve() else "no clone"


def rows(
    folder: Path, names: list[str], num: int, seed: int
) -> Iterator[tuple[str, str, int, float]]:
    """Reference, what is compared, in how many configurations, the worst deviation."""
    comparisons = [(name, what, run) for name in names for what, run in load(folder, name).items()]
    for i, (name, what, run) in enumerate(comparisons):
        count, start = num // len(comparisons) + (i < num % len(comparisons)), time.perf_counter()
        draw, offs = Random(f"{seed} {name} {what}"), []
        for _ in range(count):
            torch.manual_seed(draw.randrange(2**31))
            offs.append(run(draw))
        took = time.perf_counter() - start
        print(f"{name}: {what}: {count}, {max(offs, default=0):.1e}, {took:.0f} s", file=sys.stderr)
        yield name, what, count, max(offs, default=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--references", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=REFERENCES, default=list(REFERENCES))
    parser.add_argument("--num", type=int, default=200, help="configurations in all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with in_float64():
        table = list(rows(options.references, options.only, options.num, options.seed))
    print("| reference | commit | what is compared | configurations | worst deviation |")
    print("|---|---|---|---|---|")
    for name, what, count, off in table:
        print(f"| {name} | {commit(options.references, name)} | {what} | {count} | {off:.1e} |")
    return int(any(off > ROUNDING for *_, off in table))


if __name__ == "__main__":
    sys.exit(main())
