from lit_diffusion.commands.summary import fid_rows

RECORD = {"metric": "val/fid_360", "value": 4.0, "step": 20, "floor": 2.0}


def test_last_best_and_floor_are_told():
    rows = fid_rows([RECORD | {"value": 3.5, "step": 10}, RECORD])
    assert rows == [
        (
            "val/fid_360",
            "4 at step 20, best 3.5 at step 10; real images in their place: 2",
        )
    ]


def test_metrics_of_other_numbers_of_samples_are_not_compared():
    rows = fid_rows([RECORD, RECORD | {"metric": "val/fid_5k", "value": 1.0}])
    assert [name for name, _ in rows] == ["val/fid_360", "val/fid_5k"]
    assert rows[0][1].startswith("4 at step 20, best 4")


def test_a_fid_of_samples_that_were_not_finite_is_told_and_never_the_best():
    rows = fid_rows([RECORD, RECORD | {"value": None, "step": 30}])
    assert rows[0][1].startswith("NaN at step 30, best 4 at step 20")
    assert fid_rows([RECORD | {"value": None}])[0][1].startswith("NaN at step 20; real")


def test_a_run_without_evaluations_has_no_rows():
    assert fid_rows([]) == []
