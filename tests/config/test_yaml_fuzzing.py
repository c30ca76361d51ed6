import tempfile
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import load_yaml, validate
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.yaml_text import format_yaml, parse_yaml
from tests.drawn_examples import examples
from tests.support.python_process import ROOT

RUN = (ROOT / "configs" / "gpt_moe_tiny.yaml").read_bytes()

# Pieces with a meaning in YAML or for the readers, so that mutations reach deeper than the first character.
PIECES = [
    *("{", "}", "[", "]", ": ", "- ", "? ", "\n", "\n  ", "&a ", "*a", "<<: ", "!!int ", "!!binary ", "|\n"),
    *('"', "#", "%", "\t", "---\n", "null", "true", "-1", "1e400", ".nan", "1_0:59", "0x", "2026-01-01", "~"),
    *("include: [part.yaml]\n", "include: 3\n", "model: ", "num_layers", "\\ud800", "\\0", "\u2028"),
    *("\ufeff", "'"),
]
ADDED = st.sampled_from(PIECES).map(str.encode) | st.binary(max_size=4)
CHANGES = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30), ADDED), min_size=1, max_size=4)


def changed(content, changes):
    """Replace some bytes by others, at places given as fractions of the length."""
    for place, num_removed, added in changes:
        at = round(place * len(content))
        content = content[:at] + added + content[at + num_removed :]
    return content


@given(CHANGES)
@example([(0.5, 0, b"- " * 5000)])
@example([(1.0, 0, b"x: " + b"{a: " * 90 + b"1" + b"}" * 90)])
@example([(0.0, 10**6, b"strategy: {name: fssdp, settings: {slots: [[[1]]]}}")])
@examples(150)
def test_a_changed_run_is_valid_or_refused(changes):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.yaml")
        file.write_bytes(changed(RUN, changes))
        Path(folder, "part.yaml").write_text("training: {seed: 7}")
        refusal = ""
        try:
            run = load_run([file])
        except ConfigurationError as error:
            refusal = str(error)
        if refusal:
            assert len(refusal.splitlines()) == 1
            assert str(file) in refusal
            return
    assert run.model.moe_layers
    again = parse_yaml(format_yaml(run.model_dump(mode="json")), "again")
    assert validate(RunConfig, again, "again") == run


SCALARS = st.none() | st.booleans() | st.integers(1 - (1 << 63), (1 << 63) - 1) | st.text(max_size=8)
KEYS = st.text(max_size=8) | st.sampled_from(["model", "training", "num_layers", "slots", "name", "include"])
TREES = st.recursive(
    SCALARS | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, TREES, max_size=4))
@examples(100)
def test_written_yaml_is_read_back(tree):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "data.yaml")
        file.write_text(format_yaml(tree), encoding="utf-8")
        assert load_yaml(file) == tree
