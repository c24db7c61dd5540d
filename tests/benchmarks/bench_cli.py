"""How long the command line keeps a person waiting.

    python tests/benchmarks/bench_cli.py runs/digits

prints, as the least of three runs in processes of their own: `lit-diffusion --help`; the imports of
`lit-diffusion sample`; and what sampling 64 images in 20 steps takes beyond them.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(sys.executable).parent / "lit-diffusion"
SAMPLE = """
import sys, time
start = time.perf_counter()
from lit_diffusion.cli.main import main
import lit_diffusion.checkpoints, lit_diffusion.modules.diffusion, lit_diffusion.networks.unet
imported = time.perf_counter()
assert main(["sample", "--checkpoint", sys.argv[1], "--steps", "20", "--out", sys.argv[2]]) == 0
print(imported - start, time.perf_counter() - imported, file=sys.stderr)
"""


def seconds_of_help() -> float:
    start = time.perf_counter()
    subprocess.run([SCRIPT, "--help"], check=True, capture_output=True)
    return time.perf_counter() - start


def seconds_of_sample(checkpoint: str) -> tuple[float, float]:
    """Of the imports, and beyond them."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-c", SAMPLE, checkpoint, out]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    imports, beyond = done.stderr.strip().split("\n")[-1].split()
    return float(imports), float(beyond)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="checkpoint or run folder of a digits model")
    args = parser.parse_args()
    samples = [seconds_of_sample(args.checkpoint) for _ in range(3)]
    print(f"lit-diffusion --help          {min(seconds_of_help() for _ in range(3)):.2f} s")
    print(f"sample: imports               {min(s[0] for s in samples):.2f} s")
    print(f"sample: beyond, 64 x 20 steps {min(s[1] for s in samples):.2f} s")
