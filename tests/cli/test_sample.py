from pathlib import Path

import pytest
from support.commands import call
from support.small_digits import write_small_digits

LAST = "run/checkpoints/last.ckpt"


pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def averaged(folder):
    return write_small_digits(Path(LAST))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--labels 3,x", "--labels must be in 0..9 or -1, got 'x'."),
        ("--labels 3,10", "--labels must be in 0..9 or -1, got '10'."),
        ("--num 0", "--num must be at least 1, got 0."),
        ("--batch-size 0", "--batch-size must be at least 1, got 0."),
        ("--steps 0", "steps must be at least 1, got 0."),
        ("--weights ema_0.5", "no weights 'ema_0.5'; it has raw, ema_0.9."),
        ("--stepz 3", "no option 'stepz'. Did you mean 'steps'?"),
        ("--device banana", "--device banana cannot be used here"),
        ("--device meta:x", "--device meta:x cannot be used here"),
        ("--guidance nan", "scale must be finite, got nan."),
        ("--guidance_interval 1,2", "need --guidance S."),
        ("--guidance 2 --guidance_interval 2", "must be two numbers, LOW,HIGH, got '2'"),
        ("--guidance 2 --guidance_interval 2,1", "interval must be two levels"),
        ("--guidance 2 --guidance_rescale 2", "rescale must be in [0, 1], got 2.0"),
        ("--strength 0.5", "--mask and --strength need --init"),
        ("--init nowhere.png", "nowhere.png is no picture, and no folder of PNG files."),
        ("--init run --strength 0.5 --mask m.png", "give --strength, or --mask, not both."),
        ("--weaker run --classifier run", "give --weaker or --classifier, not both."),
        ("--weaker run --guidance_rescale 0.7", "goes with classifier-free --guidance alone."),
        ("--classifier run --guidance_interval 1,2", "goes with --guidance or --weaker."),
        ("--classifier run", "--classifier run is a DiffusionModule."),
        ("--out run/checkpoints/last.ckpt", "--out run/checkpoints/last.ckpt is a file"),
        ("--compare nonsense", "--compare must be solvers, or some of DDIM,DDPM,"),
        ("--compare DDIM,", "got ''."),
        ("--compare DDIM --compare_steps 0,2", "steps must be at least 1, got 0."),
        ("--compare DDIM --compare_steps x", "must be integers such as 0,1,2, got 'x'"),
        ("--compare_steps 2", "--compare_steps, --reference and --data need --compare."),
        ("--compare solvers --trajectory --steps 0", "leave out --steps, --trajectory."),
        ("--compare solvers --solver.steps 1 --init m.png", "leave out --init, --solver.steps."),
        (
            "--solver heunn",
            "--solver must be one of DDIM, DDPM, DPMSolverPP, DPMSolverPP2S, Euler, "
            "EulerAncestral, Heun, UniPC, or a class",
        ),
        ("--solver Heun --solver.stepz 3", "no argument 'stepz'. Did you mean 'steps'?"),
        ("--solver.steps 3 --foo 3", "there is no option 'foo'"),
        ("--solver.steps 3 --steps 4", "give --steps or --solver.steps, not both"),
        ("--solver '{class_path: lit_diffusion.solvers.HeunToo}'", "HeunToo"),
        ("--solver '{steps: [}'", "--solver must be one of DDIM"),
        ("--solver.steps many", "--solver.steps: Expected an int, got many."),
        ("--solver stranger.Heun", "add --trust stranger."),
        ("--solver lit_diffusion.grids.Karras", "does not implement protocol Solver"),
    ],
)
def test_a_mistake_is_told_in_one_line(averaged, capsys, options, told):
    assert call(f"sample --checkpoint run --out out {options}") == 2
    said = [s for s in capsys.readouterr().err.strip().split("\n") if not s.startswith("Loaded")]
    assert told in said[-1]
    assert len(said) == 1


def test_images_of_two_calls_are_never_mixed(averaged, capsys):
    call("sample --checkpoint run --num 2 --out out")
    assert call("sample --checkpoint run --num 1 --out out") == 2
    assert "--out out already holds images" in capsys.readouterr().err
    assert len(list(Path("out").glob("0*.png"))) == 2


def test_a_run_folder_without_a_checkpoint_is_told(capsys):
    Path("empty").mkdir()
    assert call("sample --checkpoint empty --out out") == 2
    assert "There is no checkpoint at empty/checkpoints/last.ckpt." in capsys.readouterr().err
