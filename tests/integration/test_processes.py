"""The installed command in processes of its own: killed, resumed, and from a wheel."""

import os
import re
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest
import torch
from support.commands import SCRIPT, equal, weights
from support.small_digits import small_digits
from support.tiny_run import write_config

from lit_diffusion.cli.loggers import read_rows

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("folder")]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def run(*command: object) -> str:
    """What a command printed, which must succeed."""
    words = [str(word) for word in command]
    ended = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def test_a_killed_run_resumes_to_the_end_of_an_undisturbed_one():
    config = small_digits(60, log_every_n_steps=5)
    config["data"]["init_args"]["batch_size"] = 75  # 19 batches an epoch
    write_config(config, Path("digits.yaml"))
    fit = SCRIPT, "fit", "--config", "digits.yaml"
    output = run(*fit, "--trainer.default_root_dir=whole")
    assert re.search(r"step \d+/60  epoch \d+  train/loss ", output)
    assert "\r" not in output  # a pipe is no terminal
    assert output.isascii()
    killed = subprocess.Popen(fit, env=ENVIRONMENT)
    last = Path("runs/digits/checkpoints/last.ckpt")
    while not last.exists() and killed.poll() is None:
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    assert torch.load(last, weights_only=True)["global_step"] == 20
    run(*fit, "--ckpt_path=last")
    assert equal(weights("whole"), weights("runs/digits"))
    whole, resumed = (Path(root, "metrics.csv").read_text() for root in ("whole", "runs/digits"))
    assert resumed == whole


def test_two_processes_write_one_run_folder():
    config = small_digits(4, devices=2, strategy="ddp")
    write_config(config, Path("digits.yaml"))
    output = run(SCRIPT, "fit", "--config", "digits.yaml")
    assert output.count("run folder  runs/digits") == 1
    assert [row["step"] for row in read_rows("runs/digits/metrics.csv")] == list("0123")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """bin/ of an environment with a wheel of this project and, through a path, what it needs."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    run("git", "-C", ROOT, "checkout-index", "--all", f"--prefix={source}/")
    pip = sys.executable, "-m", "pip", "-q"
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source)
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    site = next((folder / "env" / "lib").glob("python*/site-packages"))
    run(*pip, "--python", python, "install", "--no-deps", next(folder.glob("*.whl")))
    (site / "needed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python.parent


def test_a_wheel_trains_samples_and_loads_from_an_empty_folder(installed, tmp_path):
    write_config(small_digits(4), Path("digits.yaml"))
    program = installed / "lit-diffusion"
    run(program, "fit", "--config", "digits.yaml")
    run(program, "sample", "--checkpoint", "runs/digits", "--num", "8", "--out", "out")
    script = (
        "import lit_diffusion\n"
        "from lit_diffusion.checkpoints.loading import load\n"
        "images = load('runs/digits', weights='ema').generate(range(8))\n"
        "print(lit_diffusion.__file__, tuple(images.shape), images.dtype)\n"
    )
    output = run(installed / "python", "-c", script)
    assert str(installed.parent) in output
    assert "(8, 1, 8, 8) torch.uint8" in output
