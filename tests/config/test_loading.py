from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import apply_overrides, load_yaml, validate


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = 1
    rate: float = 0.5
    folder: Path | None = None


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    inner: Inner = Inner()
    names: tuple[str, ...] = ()
    every: int | tuple[int, ...] = 1


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def test_numbers_in_scientific_notation_are_numbers(tmp_path):
    assert load_yaml(write(tmp_path, "a: 1e-4\nb: -2E3\nc: 1e\nd: 0x10"))["a"] == 1e-4
    assert load_yaml(write(tmp_path, "b: -2E3"))["b"] == -2000.0
    assert load_yaml(write(tmp_path, "c: 1e"))["c"] == "1e"


def test_empty_file_is_an_empty_mapping(tmp_path):
    assert load_yaml(write(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2", "line 2, column 1: key 'a' is given twice"),
        ("x:\n  a: 1\n  a: 2", "line 3"),
        ("a: 1\n2: 3", "line 2, column 1: the key 2 is not a string; put it in quotes"),
        ("a: 1\nb:\n  true: x", "line 3, column 3: the key True is not a string"),
        ("- a", "got a list at the top level, wanted a mapping"),
        ("a: [1", "not valid YAML at line 1"),
        ("a: &x 1\nb: *x", "aliases"),
        ("a: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("a: 1e400", "1e400 is not a finite number"),
        ("a: 99999999999999999999", "more than 64 bits"),
    ],
)
def test_bad_yaml_is_one_clear_line(tmp_path, text, words):
    with pytest.raises(ConfigurationError) as caught:
        load_yaml(write(tmp_path, text))
    assert words in str(caught.value)
    assert "settings.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_binary_files_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no such file"):
        load_yaml(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigurationError, match="Is a directory"):
        load_yaml(tmp_path)
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"a: \xe9\xff")
    with pytest.raises(ConfigurationError, match="utf-8"):
        load_yaml(path)


def test_overrides_are_dotted_yaml_values_and_leave_the_original_alone():
    data = {"inner": {"size": 1}}
    result = apply_overrides(data, ["inner.size=3", "inner.rate=1e-2", "names=[a, b]", "other.deep.er=null"])
    assert result == {
        "inner": {"size": 3, "rate": 0.01},
        "names": ["a", "b"],
        "other": {"deep": {"er": None}},
    }
    assert data == {"inner": {"size": 1}}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("inner", "wanted key=value"),
        ("=1", "wanted key=value"),
        ("inner..size=1", "wanted key=value"),
        ("inner.size=[1", "not valid YAML"),
    ],
)
def test_bad_overrides_are_refused(override, words):
    with pytest.raises(ConfigurationError) as caught:
        apply_overrides({"size": 4, "inner": {}}, [override])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"inner": {"sise": 3}}, "inner: unknown key 'sise'; did you mean 'size'? known: size, rate, folder"),
        ({"iner": {}}, "unknown key 'iner'; did you mean 'inner'?"),
        ({"inner": {"size": "four"}}, "inner.size: got 'four' (string), wanted a valid integer"),
        ({"inner": {"size": True}}, "got True (boolean), wanted a valid integer"),
        ({"inner": {"size": 1.5}}, "wanted a valid integer"),
        ({"inner": {"rate": None}}, "inner.rate: got nothing (null), wanted a valid number"),
        ({"inner": 3}, "inner: got 3 (whole number), wanted an object"),
        ({"names": ["a", 3]}, "names.1: got 3 (whole number), wanted a valid string"),
        ({"every": "x"}, "every: got 'x' (string), wanted a valid integer or a valid array"),
        (
            {"inner": {"size": "a", "rate": "b"}},
            "inner.size: got 'a' (string), wanted a valid integer; inner.rate",
        ),
    ],
)
def test_wrong_keys_and_types_name_path_got_and_wanted(data, words):
    with pytest.raises(ConfigurationError) as caught:
        validate(Outer, data, "run.yaml")
    assert str(caught.value).startswith("run.yaml: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_valid_values_become_the_model():
    model = validate(Outer, {"inner": {"folder": "a/b", "rate": 1}, "every": [0, 1]}, "run.yaml")
    assert model.inner.folder == Path("a/b")
    assert model.every == (0, 1)
