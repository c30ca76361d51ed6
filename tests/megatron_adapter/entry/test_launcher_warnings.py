import os
import warnings

import pytest

from megatron_fssdp.megatron_adapter.entry.launcher import show_warnings_once


@pytest.mark.parametrize(
    ("rank", "shown"),
    [
        ("0", ["Apex is missing", "deprecated", "NaN", "of the script"]),
        ("3", ["NaN", "of the script"]),
    ],
)
def test_other_ranks_do_not_repeat_the_warnings_of_libraries(
    rank: str, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"RANK": rank})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        show_warnings_once()
        for text, category, module in (
            ("Apex is missing", UserWarning, "megatron.core.optimizer"),
            ("deprecated", FutureWarning, "torch.utils.data"),
            ("NaN", RuntimeWarning, "megatron.core.x"),
            ("of the script", UserWarning, "__main__"),
        ):
            warnings.warn_explicit(text, category, "x.py", 1, module=module)
    assert [str(one.message) for one in caught] == shown
