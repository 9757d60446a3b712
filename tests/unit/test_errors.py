from onboard.errors import ConsentRequiredError, OnboardError


def test_an_error_prints_as_one_line_with_its_hint() -> None:
    assert (
        str(OnboardError("config.json has no model_type", hint="Add it"))
        == "config.json has no model_type. Add it"
    )
    assert ConsentRequiredError("x").exit_code == 3
