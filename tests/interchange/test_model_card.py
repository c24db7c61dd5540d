import json
from pathlib import Path

import pytest
import yaml
from support.commands import call
from support.small_digits import write_small_digits

from lit_diffusion.interchange.model_card import model_card

RECORD = {
    "network": {"class_path": "lit_diffusion.networks.unet.UNet", "init_args": {}},
    "process": {"class_path": "lit_diffusion.processes.EDMProcess", "init_args": {"x": [1, None]}},
    "image_shape": [3, 32, 32],
    "module": {"class_path": "x.M", "init_args": {"times": "lit_diffusion.timesteps.Uniform"}},
    "data": "lit_diffusion.data.cifar10.CIFAR10",
    "step": 600,
    "weights": "ema_0.99",
}
FID = {
    **{"metric": "val/fid_360", "value": 0.43549, "step": 600, "images": 38400, "num_fake": 360},
    **{"num_real": 360, "reference": "val", "protocol": "digits-cnn", "weights": "ema"},
    **{"ema_decay": 0.99, "seeds": [0, 360], "floor": 0.3},
    "second_look": {"precision": 0.75, "recall": 0.5, "memorized": None},
}


def card(evaluations=(), **options):
    text = model_card(RECORD, evaluations, name="mine", num_parameters=12345, **options)
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1]), text


def test_a_card_has_what_the_hub_reads_and_what_a_reader_needs():
    head, text = card([FID], license="cc-by-4.0", notes="## Data\n\nMine.")
    assert (head["library_name"], head["license"]) == ("lit-diffusion", "cc-by-4.0")
    (result,) = head["model-index"][0]["results"]
    assert result["dataset"] == {"type": "cifar10", "name": "CIFAR10", "split": "val"}
    (metric,) = result["metrics"]
    assert metric == {"type": "fid", "name": "FID of 360 images by digits-cnn", "value": 0.4355}
    for part in (
        "images of 32x32 pixels and 3 channels",
        "`UNet`, 12,345 parameters",
        "| steps | 600 |",
        "| process | `EDMProcess(x=[1, null])` |",
        "| times | `Uniform` |",
        "| 0.4355 | 0.3 | 360 | 360 (val) | digits-cnn |",
        "precision 0.750, recall 0.500.",
        "## Data\n\nMine.\n\n## Scores",
    ):
        assert part in text


def test_a_distance_of_other_features_is_not_called_fid():
    other = FID | {"metric": "val/fd_dinov2_360_raw", "protocol": "dinov2-vit-l-14"}
    head, _ = card([FID, other])
    assert head["metrics"] == ["fd_dinov2", "fid"]
    metrics = [result["metrics"][0] for result in head["model-index"][0]["results"]]
    assert [metric["type"] for metric in metrics] == ["fid", "fd_dinov2"]
    assert metrics[1]["name"] == "FD-DINOV2 of 360 images by dinov2-vit-l-14"


@pytest.mark.parametrize(
    "other",
    [
        {"step": 300},
        {"weights": "raw", "ema_decay": None},
        {"ema_decay": 0.5},
        {"seeds": [360, 720]},
        {"value": None},
    ],
)
def test_scores_of_other_weights_or_steps_or_seeds_are_left_out(other):
    head, text = card([FID | other])
    assert "metrics" not in head
    assert "license" not in head
    assert "no score of these weights at this step" in text


def test_a_card_is_written_for_both_formats_and_one_that_is_there_is_kept(folder, capsys):
    write_small_digits(Path("run/checkpoints/last.ckpt"))
    Path("run/evaluations.jsonl").write_text(json.dumps(FID | {"step": 9, "ema_decay": 0.9}) + "\n")
    for form, library in (("safetensors", "lit-diffusion"), ("diffusers", "diffusers")):
        export = f"convert export --checkpoint run --out {form} --format {form} --license mit"
        assert call(f"{export} --no_comparison") == 0
        text = Path(form, "README.md").read_text()
        head = yaml.safe_load(text.split("---\n")[1])
        assert (head["library_name"], head["license"], head["metrics"]) == (library, "mit", ["fid"])
        assert head["model-index"][0]["name"] == form
    Path("diffusers/README.md").write_text("mine")
    capsys.readouterr()
    assert call(f"{export} --no_comparison") == 0
    assert "diffusers/README.md was there already" in capsys.readouterr().out
    assert Path("diffusers/README.md").read_text() == "mine"


def test_the_hub_s_own_client_reads_it():
    hub = pytest.importorskip("huggingface_hub")
    data = hub.ModelCard(card([FID], license="mit")[1]).data
    assert (data.library_name, data.license, data.model_name) == ("lit-diffusion", "mit", "mine")
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value) == ("fid", 0.4355)
    assert (result.dataset_name, result.dataset_split) == ("CIFAR10", "val")
