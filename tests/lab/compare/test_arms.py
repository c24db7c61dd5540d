"""Names of arms, and which of their settings are in force. Fits of them are in test_sweep.py."""

from pathlib import Path

import pytest
import yaml

from lit_diffusion.lab.compare.arms import arm_files, overrides

ROOT = Path(__file__).parent.parent.parent
ARMS = ROOT / "configs" / "arms"


def told(*settings):
    """What is said of files with these settings, a.yaml, b.yaml, ..., joined."""
    files = []
    for name, setting in zip("abc", settings, strict=False):
        Path(f"{name}.yaml").write_text(yaml.safe_dump(setting))
        files.append(f"{name}.yaml")
    return list(overrides(files))


pytestmark = pytest.mark.usefixtures("folder")


def test_two_arms_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"two arms are named md; rename other/md\.yaml"):
        arm_files("run.yaml", ["md.yaml", "other/md.yaml"])


@pytest.mark.parametrize("arm", ["md.yaml+clts.yaml+md.yaml", "md.yaml+./md.yaml", "run.yaml"])
def test_a_file_that_an_arm_has_twice_is_refused(arm):
    with pytest.raises(ValueError, match=r"arm .* has .* twice, .*; name it once"):
        arm_files("run.yaml", [arm])


def test_a_setting_that_a_later_file_replaces_is_told():
    expected = "b.yaml replaces what a.yaml sets: model.lr"
    assert told({"model": {"lr": 1.0, "steps": 3}}, {"model": {"lr": 2.0}}) == [expected]


def test_equal_and_other_settings_are_not_told():
    assert told({"model": {"lr": 1.0}}, {"model": {"lr": 1.0}}, {"model": {"steps": 3}}) == []


def test_a_value_in_place_of_a_section_replaces_it_and_a_section_adds_to_a_value():
    section = {"loss": {"init_args": {"gamma": 5}}}
    assert told(section, {"loss": "Simple"}) == ["b.yaml replaces what a.yaml sets: loss"]
    assert told({"loss": "Simple"}, section) == []


def test_a_list_that_is_added_to_is_kept_and_one_that_is_set_is_lost():
    added = {"trainer": {"callbacks+": ["A"]}}
    assert told(added, {"trainer": {"callbacks+": ["B"]}}) == []
    expected = ["b.yaml replaces what a.yaml sets: trainer.callbacks"]
    assert told(added, {"trainer": {"callbacks": ["B"]}}) == expected


def test_every_pair_of_files_is_looked_at():
    found = told({"lr": 1}, {"steps": 2}, {"lr": 3, "steps": 4})
    assert [sentence.split()[3] for sentence in found] == ["a.yaml", "b.yaml"]


def test_an_empty_file_replaces_nothing():
    assert told({"lr": 1}, None) == []


def test_of_the_shipped_arms_two_weightings_replace_each_other_and_the_papers_methods_do_not():
    def files(*names):
        return [str(ARMS / name) for name in names]

    assert len(list(overrides(files("p2.yaml", "min-snr.yaml")))) == 1
    assert list(overrides(files("mdlrc.yaml", "digits/clts.yaml"))) == []
