from __future__ import annotations

import pytest

from harness.numerics.formats import FORMATS, format_named


def test_every_format_is_found_by_its_own_name() -> None:
    for name, fmt in FORMATS.items():
        assert format_named(name) is fmt
        assert format_named(fmt.name) == fmt
    second_names = {name for name, fmt in FORMATS.items() if fmt.name != name}
    assert second_names == {"mxfp4", "mxfp8"}


def test_second_names_are_what_engines_load_or_apply() -> None:
    assert format_named("mxfp4").name == "mxfp4_ct"
    assert format_named("mxfp8").name == "mxfp8_rceil"


@pytest.mark.parametrize(
    ("name", "element", "columns", "symmetric", "rule"),
    [
        ("int4_g32", "int4", 32, True, "ct"),
        ("int3_g48_asym", "int3", 48, False, "ct"),
        ("int2_g16_asym_qat", "int2", 16, False, "qat"),
        ("int8_g7_qat", "int8", 7, True, "qat"),
    ],
)
def test_integer_groups_of_any_size(name: str, element: str, columns: int, symmetric: bool, rule: str) -> None:
    fmt = format_named(name)
    assert (fmt.name, fmt.element, fmt.tile) == (name, element, (1, columns))
    assert (fmt.symmetric, fmt.rule) == (symmetric, rule)


@pytest.mark.parametrize("name", ["int5_g32", "int4_g0", "int4", "int4_g32_asymm", "", "E4M3_TENSOR"])
def test_unknown_name_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"^format={name}: unknown; "):
        format_named(name)


def test_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"nearest: .*e4m3_tensor"):
        format_named("e4m3_tenosr")
    with pytest.raises(ValueError, match=r"nearest: .*nvfp4"):
        format_named("nvpf4")
