"""The installed command in processes of its own: killed, resumed, and from a wheel."""

import os
import re
import signal
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


def start(*argv: str, program: str = SCRIPT) -> subprocess.Popen:
    return subprocess.Popen(
        [program, *argv],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*argv: str, program: str = SCRIPT) -> str:
    process = start(*argv, program=program)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out + err


def test_a_killed_run_resumes_to_the_end_of_an_undisturbed_one():
    config = small_digits(60, log_every_n_steps=5)
    config["data"]["init_args"]["batch_size"] = 75  # 19 batches an epoch
    write_config(config, Path("digits.yaml"))
    output = finish("fit", "--config", "digits.yaml", "--trainer.default_root_dir=whole")
    assert re.search(r"step \d+/60  epoch \d+  train/loss ", output)
    assert "\r" not in output  # a pipe is no terminal
    assert output.isascii()
    killed = start("fit", "--config", "digits.yaml")
    last = Path("runs/digits/checkpoints/last.ckpt")
    while not last.exists() and killed.poll() is None:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert torch.load(last, weights_only=True)["global_step"] == 20
    finish("fit", "--config", "digits.yaml", "--ckpt_path=last")
    assert equal(weights("whole"), weights("runs/digits"))
    rows = [Path(f"{run}/metrics.csv").read_text() for run in ("whole", "runs/digits")]
    assert rows[0] == rows[1]


def test_two_processes_write_one_run_folder():
    config = small_digits(4, devices=2, strategy="ddp")
    write_config(config, Path("digits.yaml"))
    output = finish("fit", "--config", "digits.yaml")
    assert output.count("run folder  runs/digits") == 1
    assert [row["step"] for row in read_rows("runs/digits/metrics.csv")] == list("0123")
    again = start("fit", "--config", "digits.yaml")
    assert "already holds a run" in again.communicate(timeout=300)[1]
    assert again.returncode == 2


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """bin/ of an environment with a wheel of this project and, through a path, what it needs."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = subprocess.run(
        ["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "-q"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(wheel, check=True)
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    site = next((folder / "env" / "lib").glob("python*/site-packages"))
    built = next(folder.glob("*.whl"))
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(built)], check=True)
    (site / "needed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python.parent


def test_a_wheel_trains_samples_and_loads_from_an_empty_folder(installed, tmp_path):
    write_config(small_digits(4), Path("digits.yaml"))
    program = str(installed / "lit-diffusion")
    finish("fit", "--config", "digits.yaml", program=program)
    finish("sample", "--checkpoint", "runs/digits", "--num", "8", "--out", "out", program=program)
    script = (
        "import lit_diffusion\n"
        "from lit_diffusion.checkpoints.loading import load\n"
        "images = load('runs/digits', weights='ema').generate(range(8))\n"
        "print(lit_diffusion.__file__, tuple(images.shape), images.dtype)\n"
    )
    output = finish("-c", script, program=str(installed / "python"))
    assert str(installed.parent) in output
    assert "(8, 1, 8, 8) torch.uint8" in output
