from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import Settings, apply_overrides, load_yaml, validate


class Inner(Settings):
    size: int = 1
    rate: float = 0.5
    folder: Path | None = None


class Outer(Settings):
    inner: Inner = Inner()
    names: tuple[str, ...] = ()
    every: int | tuple[int, ...] = 1


def write(folder, text):
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def test_numbers_in_scientific_notation_are_numbers(tmp_path):
    values = load_yaml(write(tmp_path, "a: 1e-4\nb: -2E3\nc: 1e\nd: 0x10"))
    assert values == {"a": 1e-4, "b": -2000.0, "c": "1e", "d": "0x10"}
    assert load_yaml(write(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x:\n  a: 1\n  a: 2", "line 3, column 3: key 'a' is given twice"),
        ("a: 1\n2: 3", "line 2, column 1: the key 2 is not a string; put it in quotes"),
        ("- a", "got ['a'] at the top level, wanted a mapping"),
        ("a: [1", "not valid YAML at line 1"),
        ("a: &x 1\nb: *x", "aliases"),
        ("a: !!python/object/apply:os.getcwd []", "tags (tag:yaml.org,2002:python/object/apply:os.getcwd)"),
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


@pytest.mark.parametrize(
    ("name", "words"), [("none", "no such file"), ("", "is a directory"), ("latin", "utf-8")]
)
def test_what_is_no_text_file_is_refused(tmp_path, name, words):
    (tmp_path / "latin").write_bytes(b"a: \xe9\xff")
    with pytest.raises(ConfigurationError, match=words):
        load_yaml(tmp_path / name)


def test_overrides_are_dotted_yaml_values_and_leave_the_original_alone():
    given = {"inner": {"size": 1}}
    result = apply_overrides(given, ["inner.size=3", "inner.rate=1e-2", "names=[a, b]", "other.deep.er=null"])
    inner = {"size": 3, "rate": 0.01}
    assert result == {"inner": inner, "names": ["a", "b"], "other": {"deep": {"er": None}}}
    assert given == {"inner": {"size": 1}}
    for override in ("inner", "=1", "inner..size=1", "inner.size=[1"):
        with pytest.raises(ConfigurationError, match=r"wanted key=value|not valid YAML"):
            apply_overrides(given, [override])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"inner": {"sise": 3}}, "inner: unknown key 'sise'; did you mean 'size'? known: size, rate, folder"),
        ({"inner": {"size": "4"}}, "inner.size: got '4', wanted a valid integer"),
        ({"inner": {"size": True}}, "got True, wanted a valid integer"),
        ({"inner": {"rate": None}}, "inner.rate: got null, wanted a valid number"),
        ({"inner": 3}, "inner: got 3, wanted an object"),
        ({"names": ["a", 3]}, "names.1: got 3, wanted a valid string"),
        ({"every": "x"}, "every: got 'x', wanted a valid integer or a valid array"),
        ({"inner": {"size": "a", "rate": "b"}}, "wanted a valid integer; inner.rate: got 'b'"),
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
    assert (model.inner.folder, model.every) == (Path("a/b"), (0, 1))
