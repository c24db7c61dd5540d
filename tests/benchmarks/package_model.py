"""Make a model of the package from a run. Call it where the run was started:

    python tests/benchmarks/package_model.py runs/digits digits \
        --command "lit-diffusion fit --config configs/digits.yaml" --hardware "45 s on two cores"

It replaces the folder lit_diffusion/pretrained/NAME, which gets

    network.safetensors     the average of the weights, in float16
    network.json, README.md how the module is built, and the model card, from `convert export`
    config.yaml             the config of the run without paths of the machine
    evaluations.jsonl       the last FID of the run; `evaluate` uses the same FID protocol
    NAME-cnn-*.safetensors  the feature extractor of this FID, if one was trained

The script measures the FID again with the written weights, prints it, and adds it to the card.
"""

import argparse
import json
import shutil
import subprocess
from pathlib import Path

import yaml

from lit_diffusion.cli.convert import export
from lit_diffusion.cli.evaluating import EvaluationOptions, evaluate
from lit_diffusion.cli.options import SamplingOptions
from lit_diffusion.cli.run_data import evaluations_of_run
from lit_diffusion.cli.run_folder import latest_config
from lit_diffusion.files import atomic_write_text
from lit_diffusion.pretrained import FOLDER

DATA = {
    "digits": """The model was trained on the 1,437 training images of
`lit_diffusion.data.digits.Digits`: handwritten digits of 8x8 pixels. They are from the test part of
*Optical Recognition of Handwritten Digits* (E. Alpaydin and C. Kaynak, UCI Machine Learning
Repository, 1998), which scikit-learn contains. The real images of the FID are the 360 held-out
digits.""",
    "mnist": """The model was trained on the 60,000 training images of MNIST: handwritten digits of
28x28 pixels (Y. LeCun, C. Cortes and C. Burges, *The MNIST database of handwritten digits*, 1998).
The real images of the FID are the 10,000 test images.""",
}
NOTES = """## Data

{data}

## How to repeat it

```bash
{command}
```

Check out commit `{commit}` first. The run took {hardware}.
The settings of the run are in `config.yaml` in this folder. The script
`tests/benchmarks/package_model.py` wrote this folder from the files of the run.

## Precision

`network.safetensors` contains the weights in {dtype}. The scores below were measured during
training, with float32 weights. With the {dtype} weights, the images of the same {num:,} seeds have
an FID of {fid:.4g}.

## Intended use

The model is an example for first steps with lit-diffusion and for tests of software. The license
of lit-diffusion applies to the model. The training images belong to their authors."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("run", type=Path)
    add("name", choices=DATA)
    add("--command", required=True, help="command of the run, for the card")
    add("--hardware", required=True, help="time and hardware of the run, for the card")
    add("--commit", help="of the code that the run used (default: that of this checkout)")
    add("--dtype", default="float16", choices=("float16", "float32"))
    args = parser.parse_args()

    folder = FOLDER / args.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    evaluation = last_evaluation(args.run)
    atomic_write_text(folder / "evaluations.jsonl", json.dumps(evaluation) + "\n")
    config = yaml.safe_dump(portable_config(args.run), sort_keys=False)
    atomic_write_text(folder / "config.yaml", config)
    for extractor in args.run.glob("*.safetensors"):
        shutil.copy(extractor, folder)

    card = {"dtype": args.dtype, "license": "mit", "name": args.name}
    export(args.run, folder, **card)
    num = evaluation["num_fake"]
    options = SamplingOptions(checkpoint=str(folder), batch_size=min(num, 500))
    fid = evaluate(EvaluationOptions(options, num=num))["fid"]
    print(f"FID of {num}: {evaluation['value']:.6g} in training, {fid:.6g} from the file")

    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", args.commit or "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    facts = {"command": args.command, "hardware": args.hardware, "dtype": args.dtype}
    notes = NOTES.format(data=DATA[args.name], commit=commit, num=num, fid=fid, **facts)
    (folder / "README.md").unlink()
    print(export(args.run, folder, **card, notes=notes))
    text = (folder / "README.md").read_text()
    text = text.replace("`FOLDER` is the folder of this file.", "The model is part of the package.")
    atomic_write_text(folder / "README.md", text.replace("FOLDER", args.name))


def last_evaluation(run: Path) -> dict:
    """The last FID of the average of the weights in a run."""
    records = evaluations_of_run(run)
    return [e for e in records if e["weights"].startswith("ema") and e["seeds"][0] == 0][-1]


def portable_config(run: Path) -> dict:
    """The config of a run without paths of the machine."""
    config = yaml.safe_load(latest_config(run).read_text())
    for name in ("default_root_dir", "logger", "plugins"):
        config["trainer"].pop(name, None)
    names = ("seed_everything", "trainer", "model", "data")
    return {name: config[name] for name in names if name in config}


if __name__ == "__main__":
    main()
